"""Find and replace lines of texts. Pure functions.

A text is edited with plain newlines; a file whose every line ends with a carriage return gets them back, and so does one with a
byte order mark.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from composer_nb.harness.syntax import TextFormat
from composer_nb.harness.tools.session import EDIT_BYTES
from composer_nb.harness.tools.tool_call import invalid


def places(lines: Sequence[str], block: Sequence[str], start: int) -> Iterator[int]:
    """Yield where `block`, at least one line, begins from the line `start` on.

    The places do not overlap, so the time is linear in the length of the text.
    """
    searched, block_text = "\n".join(("", *lines[start:], "")), "\n".join(("", *block, ""))
    line_index, counted_to = start, 0
    offset = searched.find(block_text)
    while offset >= 0:
        line_index, counted_to = line_index + searched.count("\n", counted_to, offset), offset
        yield line_index
        offset = searched.find(block_text, offset + len(block_text) - 1)


def replace(text: str, old: str, new: str, replace_all: bool) -> tuple[str, list[int]]:
    """Return `text` with `new` for `old`, and the lines, from 1, at which `old` began.

    Raises ToolError (InvalidArguments) if nothing changes, if `old` is missing, or occurs more than once without
    `replace_all`, and if the result is larger than a file that may be changed: many short texts can become long ones.
    """
    if not old:
        raise invalid("old_string is empty: say what to replace, or use write")
    if old == new:
        raise invalid("old_string and new_string are the same")
    layout = TextFormat.of(text)
    old, new = (part.replace(layout.newline, "\n") for part in (old, new))
    plain = layout.plain(text)
    starts, offset = list[int](), plain.find(old)
    while offset >= 0:
        starts.append(offset)
        offset = plain.find(old, offset + len(old))
    if not starts:
        first_line = next(line.strip() for line in (*old.split("\n"), old) if line.strip() or line is old)
        near = [number for number, line in enumerate(plain.split("\n"), 1) if first_line and first_line == line.strip()]
        hint = f"; its first line is line {near[0]}, but what follows, or white space, differs" if near else ""
        raise invalid(f"old_string is not in the file{hint}")
    if len(starts) > 1 and not replace_all:
        text = f"old_string occurs {len(starts)} times: include more context, or set replace_all"
        raise invalid(text)
    if len(plain) + len(starts) * (len(new) - len(old)) > EDIT_BYTES:
        raise invalid(f"the file would have more than {EDIT_BYTES} characters; change it with a program")
    before = accumulate(plain.count("\n", begin, end) for begin, end in pairwise((0, *starts)))
    return layout.restore(plain.replace(old, new)), [count + 1 for count in before]
