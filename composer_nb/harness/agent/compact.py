"""The compact wire format for tiny models: one special token a role, one line a call.

    <|bos|><|user|>fix f.py: sum of items<|end|><|call|>read f.py<|end|><|out|>1def f(xs):\\n…<|end|><|call|>…

A turn of the agent is the tokens between `<|call|>` and `<|end|>`. Rendering and parsing are inverse to one another on every
call whose path has no white space and whose line has at most six digits; whatever else the model writes parses to a ToolError
of kind InvalidArguments. Text is kept exactly; where it spells a special token, that spelling is text and not the token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import Result, Said, User, Written, token_id
from composer_nb.harness.rollout import Kind
from composer_nb.harness.tools.tool_call import ToolCall, ToolError

SPECIALS = ("<|pad|>", "<|bos|>", "<|user|>", "<|call|>", "<|out|>", "<|end|>", "<|to|>")
_WORDS = {"read_file": "read", "edit_line": "edit", "run_tests": "test", "finish": "done"}


class CompactRenderer:
    """Renders instructions, calls and observations as token ids, and parses calls from them.

    Raises ValueError for a tokenizer that lacks a token of the format, or that always finds one in plain text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.pad, self.bos, self.user, self.call, self.out, self.end, self.to = (
            token_id(tokenizer, token) for token in SPECIALS
        )
        self.stop = frozenset((self.pad, self.bos, self.user, self.call, self.out, self.end))
        """Tokens that end the agent's turn: `<|end|>`, and every token that the agent must not write."""
        self._plain = Tokenizer.from_str(tokenizer.to_str())  # a copy: the caller's keeps finding special tokens
        self._plain.encode_special_tokens = True
        if found := {token for token in SPECIALS if tokenizer.token_to_id(token) in self.encode(token)}:
            raise ValueError(
                f"the tokenizer finds {', '.join(sorted(found))} in plain text: these tokens must be special"
            )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text, none of them special: a spelled special token is encoded as characters."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def read(self, news: Sequence[User | Result], system: str = "") -> list[int]:
        """Render what a policy reads before its next turn. The format has one call a turn, and no system text."""
        [message] = news
        return self.prompt(message.text) if isinstance(message, User) else self.observation(message.text)

    def parse(self, token_ids: Sequence[int]) -> Said:
        """Read a turn: exactly one call, or why it cannot be read."""
        written = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        call: ToolCall | ToolError
        try:
            call = self.parse_call(token_ids)
        except ToolError as error:
            call = error
        return Said(calls=(Written(id="call_0", call=call, text=written),))

    def kinds(self, token_ids: Sequence[int]) -> list[Kind]:
        """Return the kind of each token of a turn."""
        return [Kind.TOOL_CALL] * len(token_ids)

    def prompt(self, instruction: str) -> list[int]:
        return [self.bos, self.user, *self.encode(instruction), self.end, self.call]

    def observation(self, text: str) -> list[int]:
        """Render what follows the agent's `<|end|>`: the answer of the tool, and the cue for the next call."""
        return [self.out, *self.encode(text), self.end, self.call]

    def render_call(self, call: ToolCall) -> list[int]:
        """Render a call, `<|end|>` included."""
        word, arguments = _WORDS[call.name], call.arguments
        if call.name == "read_file":
            body = self.encode(f"{word} {arguments['path']}")
        elif call.name == "edit_line":
            head = self.encode(f"{word} {arguments['path']} {arguments['line']}")
            body = [*head, self.to, *self.encode(str(arguments["text"]))]
        else:
            body = self.encode(word)
        return [*body, self.end]

    def parse_call(self, token_ids: Sequence[int]) -> ToolCall:
        """Parse a call, its final token included. Raises ToolError (InvalidArguments) for anything else."""
        *body, last = token_ids or [self.pad]
        if last != self.end:
            raise ToolError("InvalidArguments", "bad call")
        if self.to in body:
            cut = body.index(self.to)
            head, text = self._text(body[:cut]), self._text(body[cut + 1 :])
            if match := re.fullmatch(r"edit (\S+) ([0-9]{1,6})", head):
                return ToolCall(
                    name="edit_line",
                    arguments={"path": match[1], "line": int(match[2]), "text": text},
                )
        else:
            head = self._text(body)
            if match := re.fullmatch(r"read (\S+)", head):
                return ToolCall(name="read_file", arguments={"path": match[1]})
            if head in ("test", "done"):
                return ToolCall(name="run_tests" if head == "test" else "finish", arguments={})
        raise ToolError("InvalidArguments", "bad call")

    def _text(self, token_ids: Sequence[int]) -> str:
        if any(token in self.stop or token == self.to for token in token_ids):
            raise ToolError("InvalidArguments", "bad call")
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
