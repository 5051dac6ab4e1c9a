"""Functions with a number each, in many modules, and requests to change one that share no word with any of them.

A function is found by the meaning of its name or by reading on, and told by its number, which the request spells out.
"""

from random import Random

from composer_nb.tour.programs import Program
from composer_nb.tour.repairs import BuggyProgram, evaluate

# Names of functions, each with its paraphrase.
PARAPHRASES = dict(
    pair.split(": ")
    for pair in """\
read_mailbox_inbox: incoming letters
remove_directory_tree: delete whole folder
unzip_archive_member: extract packed part
encode_hex_payload: binary text
quote_url_query: web site
split_path_suffix: file ending
lock_thread_mutex: synchronize parallel access
spawn_process_child: launch program
wait_socket_timeout: network connection late
parse_header_field: message metadata
format_traceback_frame: print error
shuffle_random_seed: mix chance
round_decimal_digits: exact fraction precision
compare_sequence_diff: similar lines
tokenize_source: lexical scanner
compile_pattern_regex: match expression
hash_digest_block: checksum fingerprint
sort_heap_priority: order smallest first
count_calendar_weekday: month dates
parse_option_argv: command line flag
log_handler_record: debug warnings
render_html_tag: web page markup
open_database_cursor: sql table
dump_pickle_object: serialize instance
load_json_document: deserialize data
wrap_paragraph_width: break long lines
translate_locale_catalog: language settings
import_module_loader: package finder
copy_stream_buffer: duplicate bytes
schedule_event_delay: later callback
cancel_task_future: abort coroutine
get_password_user: login secret
normalize_unicode_char: letter accents
resolve_hostname_address: dns lookup
verify_certificate_ssl: trusted secure connection
profile_timer_calls: measure speed
cache_result_key: memoize function
draw_canvas_color: paint picture
play_audio_sample: sound music
list_symlink_target: follow links
chmod_mode_owner: file permission rights
merge_config_section: settings file
escape_shell_argument: safe command line
kill_signal_pid: terminate program
append_csv_field: comma separated
compute_mean_variance: statistics average
solve_matrix_vector: linear algebra
invert_mapping_keys: swap dictionary
poll_selector_event: ready descriptors
connect_smtp_relay: send email
parse_xml_element: markup children
strip_whitespace_indent: leading spaces
format_datetime_zone: utc offset
convert_timestamp_epoch: seconds since midnight
check_abstract_base: virtual subclass
inspect_signature_parameter: callable annotations
patch_mock_attribute: fake test
disassemble_bytecode_opcode: virtual machine instruction
trace_coverage_report: visited statements
put_queue_worker: producer consumer
map_pool_executor: parallel jobs
allocate_memory_snapshot: usage peak
collect_garbage_cycle: unreachable
compress_gzip_level: deflate smaller
make_temporary_prefix: scratch space
cookie_session_expire: browser state
download_http_response: web server reply
sign_hmac_token: authenticate
pick_weighted_choice: lottery
complex_phase_angle: polar coordinates
format_currency_symbol: monetary
unpack_struct_endian: byte order layout""".split("\n")
)


DIGITS = dict(zip("123456789", "one two three four five six seven eight nine".split(), strict=True))
NUMBERS = tuple(first + second for first in DIGITS for second in DIGITS)
INPUTS = 12


def draw_wrong_number(rng: Random, heldout: bool) -> BuggyProgram:
    """Draw a function with a wrong number. Its name, which is the program's family, is of the third that is held out, or of the
    rest."""
    name = rng.choice([name for index, name in enumerate(PARAPHRASES) if (index % 3 == 2) == heldout])
    sign = rng.choice("+-*")
    right, wrong = rng.sample(NUMBERS, 2)
    spelt = [" ".join(DIGITS[digit] for digit in number) for number in (right, wrong)]
    source, spec = _source(name, sign, right), " not ".join(spelt)
    program = Program(family=name, source=source, spec=spec, inputs=("number",))
    inputs, results = evaluate(program, INPUTS, rng)
    return BuggyProgram(
        program=program, kind="paraphrase", buggy=_source(name, sign, wrong), inputs=inputs, expected=results
    )


def draw_others(rng: Random, count: int, candidate: BuggyProgram) -> dict[str, str]:
    """Return the sources of `count` other functions by name, none with the number of the candidate."""
    names = rng.sample([name for name in PARAPHRASES if name != candidate.program.family], count)
    numbers = rng.sample([number for number in NUMBERS if not candidate.buggy.endswith(number)], count)
    return {name: _source(name, rng.choice("+-*"), number) for name, number in zip(names, numbers, strict=True)}


def _source(name: str, sign: str, number: str) -> str:
    subject = name.rpartition("_")[2]
    return f"def f({subject}):\n    return {subject} {sign} {number}"


def paraphrase(rng: Random, name: str) -> list[str]:
    """Return the words of a paraphrase in any order, with a word joined of two others, so that a policy learns to copy words that
    it does not know."""
    pool = " ".join(PARAPHRASES.values()).split()
    words = [*PARAPHRASES[name].split(), rng.choice(pool)[:3] + rng.choice(pool)[-3:]]
    return rng.sample(words, len(words))
