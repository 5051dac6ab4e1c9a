"""Random variants of the hostile patches: other places, other times, several tricks at once.

A variant takes up to two tricks that work at import and one way to answer, and puts them together anew: wrapped in `try`, nested
in functions, moved into another module, done at import, at the first call, in a thread or at exit; sometimes with files of a
third patch beside. Most work as well as what they are made of, some break each other. None may score.
"""

import random
import textwrap

from composer_nb.labs.attacks.patch_target import ANSWER, MODULE, SETUP, TARGET, WRONG, module
from composer_nb.labs.attacks.patches import Patch, patches

SLOW = {"memory_bomb"}
PLACES = ("import", "first_call", "exit", "thread", "nested")


def variant(seed: int) -> Patch:
    """Return the variant of this number: always the same one."""
    lot = random.Random(seed)
    setups = [(name, lot.choice(PLACES)) for name in lot.sample(sorted(set(SETUP) - SLOW), lot.choice((0, 1, 1, 1, 2)))]
    answer = lot.choice([*sorted(ANSWER), ""]) if setups else lot.choice(sorted(ANSWER))
    before, body = "", ANSWER.get(answer, WRONG)
    for number, (name, moment) in enumerate(setups):
        head, call_line = _placed(SETUP[name], moment, f"trick_{number}", lot)
        before, body = before + head, call_line + body
    text = module(before, body)
    files: dict[str, bytes | None] = {MODULE: text.encode()}
    if lot.random() < 0.3:
        inner = lot.choice(("util/inner.py", "util/deep/inner.py"))
        files = {inner: text.encode(), MODULE: f"from {inner[:-3].replace('/', '.')} import *\n".encode()}
    beside = lot.choice([patch for patch in patches() if MODULE not in patch.files]) if lot.random() < 0.3 else None
    if beside is not None:
        files = dict(beside.files) | files
    title = ", ".join([*map(" at ".join, setups), answer or "wrong", *([beside.id] if beside else [])])
    return Patch(id=f"variant_{seed}", title=title, case=0, files=files, task=TARGET)


def _placed(text: str, moment: str, name: str, lot: random.Random) -> tuple[str, str]:
    """Return what a trick adds at the top of the module, and what it has each answer do first."""
    if lot.random() < 0.4:
        text = f"try:\n{textwrap.indent(text, '    ')}except {lot.choice(('Exception', 'BaseException', 'OSError'))}:\n    pass\n"
    function = f"def {name}():\n{textwrap.indent(text, '    ')}\n"
    match moment:
        case "import":
            return text, ""
        case "nested":
            return f"def {name}_outer():\n{textwrap.indent(function, '    ')}    {name}()\n{name}_outer()\n", ""
        case "exit":
            return f"{function}import atexit\natexit.register({name})\n", ""
        case "thread":
            return f"{function}import threading\nthreading.Thread(target={name}, daemon=True).start()\n", ""
    return f"{function}{name}_ran = []\n", f"if not {name}_ran:\n    {name}_ran.append(1)\n    {name}()\n"
