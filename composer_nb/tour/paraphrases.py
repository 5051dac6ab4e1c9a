"""Names of functions, each with a paraphrase of three words that no code uses."""

from __future__ import annotations

from random import Random

PARAPHRASES = dict(
    pair.split(": ")
    for pair in """\
read_mailbox_inbox: incoming letters
remove_directory_tree: delete whole folder
unzip_archive_member: extract packed part
encode_base64_payload: binary text
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


def draw_names(rng: Random, count: int, heldout: bool) -> list[str]:
    """Return `count` names of `PARAPHRASES`; the first is of the third that is held out, or of the rest."""
    names = list(PARAPHRASES)
    first = rng.choice([name for place, name in enumerate(names) if (place % 3 == 2) == heldout])
    return [first, *rng.sample([name for name in names if name != first], count - 1)]
