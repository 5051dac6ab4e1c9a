#!/usr/bin/env python3
"""The drawings of the course, as SVG files in docs/images: `python -m scripts.docs.drawings` writes them.

Colours follow the reader's light or dark theme. Each drawing has a ground of its own, so it stays legible on a page of the other
theme. Lengths are in pixels; a drawing is 760 wide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

from composer_nb.views.style import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
WIDTH = 760
COLOURS = {"blue": BLUE, "orange": ORANGE, "green": GREEN, "red": VERMILION, "purple": PURPLE, "grey": GREY}
STYLE = """
svg { font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; font-size: 14px }
.ground { fill: #ffffff; stroke: #d8d8dc } text { fill: #1f1f24 } .soft { fill: #5c5c66 } .code { font-family: monospace }
.line { stroke: #5c5c66; stroke-width: 1.6; fill: none } .head { fill: #5c5c66 } .dashed { stroke-dasharray: 5 4 }
@media (prefers-color-scheme: dark) {
.ground { fill: #17171c; stroke: #3a3a42 } text { fill: #ececf1 } .soft { fill: #a9a9b4 }
.line { stroke: #a9a9b4 } .head { fill: #a9a9b4 } }
"""


class Drawing:
    """An SVG picture that grows by its methods."""

    def __init__(self, height: int, title: str) -> None:
        self.height, self.title, self.parts = height, title, list[str]()

    def rect(
        self, x: float, y: float, width: float, height: float, colour: str, *, solid: float = 0.16, round: int = 6
    ) -> None:
        paint = COLOURS[colour]
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round}" fill="{paint}" '
            f'fill-opacity="{solid}" stroke="{paint}" stroke-opacity="{1 if solid > 0.05 else 0.35}" stroke-width="1.4"/>'
        )

    def text(self, x: float, y: float, words: str, *, size: int = 14, anchor: str = "middle", kind: str = "") -> None:
        weight = ' font-weight="600"' if kind == "bold" else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" class="{kind}"{weight}>{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, label: str, note: str = "", colour: str = "grey"
    ) -> None:
        """Draw a box around its middle, with a label and lines of a note below it."""
        self.rect(x - width / 2, y - height / 2, width, height, colour)
        notes = note.split("\n") if note else []
        top = y + 5 - 8.5 * len(notes)
        self.text(x, top, label, kind="bold")
        for number, line in enumerate(notes):
            self.text(x, top + 18 + 16 * number, line, size=12, kind="soft")

    def arrow(
        self, *points: tuple[float, float], words: str = "", at: tuple[float, float] = (0, 0), dashed: bool = False
    ) -> None:
        """Draw a line through points, with a head at the last one and words around `at`."""
        (x0, y0), (x1, y1) = points[-2:]
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        path = " ".join(
            f"{'ML'[number > 0]}{x:g} {y:g}" for number, (x, y) in enumerate([*points[:-1], (x1 - 7 * ux, y1 - 7 * uy)])
        )
        corners = [
            (x1, y1),
            (x1 - 9 * ux - 4.5 * uy, y1 - 9 * uy + 4.5 * ux),
            (x1 - 9 * ux + 4.5 * uy, y1 - 9 * uy - 4.5 * ux),
        ]
        self.parts.append(f'<path class="line{" dashed" * dashed}" d="{path}"/>')
        self.parts.append(f'<polygon class="head" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}"/>')
        for number, line in enumerate(words.split("\n") if words else []):
            self.text(at[0], at[1] + 15 * number, line, size=12, kind="soft")

    def svg(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" height="{self.height}" '
            f'role="img">\n<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n'
            f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{self.height - 1}" rx="10"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def loop() -> Drawing:
    d = Drawing(330, "The loop of reinforcement learning: sample, grade, compare, learn, publish, and again")
    d.box(130, 70, 190, 70, "sample", "G attempts at each of P tasks", "blue")
    d.box(400, 70, 170, 70, "grade", "hidden tests, sandbox", "green")
    d.box(650, 70, 170, 70, "compare", "R − mean of the group", "green")
    d.box(650, 250, 170, 70, "learn", "clipped loss, gradient", "orange")
    d.box(400, 250, 180, 70, "update", "AdamW, float32 masters", "orange")
    d.box(130, 250, 190, 70, "publish", "bf16 weights, a new version", "blue")
    d.arrow((225, 70), (315, 70), words="rollouts", at=(268, 60))
    d.arrow((485, 70), (565, 70), words="rewards R", at=(523, 60))
    d.arrow((650, 105), (650, 215), words="tokens, each with\nan advantage A", at=(583, 157))
    d.arrow((565, 250), (490, 250), words="∇", at=(527, 240))
    d.arrow((310, 250), (225, 250), words="masters", at=(272, 240))
    d.arrow((130, 215), (130, 105), words="weights,\nversion n + 1", at=(185, 157))
    d.text(380, 150, "One step of RL", size=16, kind="bold")
    d.text(380, 174, "Groups whose rewards are all equal", size=12, kind="soft")
    d.text(380, 190, "have A = 0 and teach nothing.", size=12, kind="soft")
    return d


def services() -> Drawing:
    d = Drawing(390, "Asynchronous services: coordinator, inference, environments, trainer and their stores")
    d.box(
        380,
        60,
        300,
        72,
        "coordinator",
        "which worker has which rollout; how far\nsampling may run ahead of training",
        "purple",
    )
    d.box(130, 200, 200, 84, "environments", "run the agents' tool calls in\nsandboxes; grade the results", "green")
    d.box(380, 200, 190, 84, "inference", "engines write tokens and\nrecord log-probs and routes", "blue")
    d.box(635, 200, 200, 84, "trainer", "takes finished groups, in one\nprocess or on many ranks", "orange")
    d.box(255, 335, 270, 60, "run.db", "rollouts, batches, ledger: one transaction", "grey")
    d.box(560, 335, 250, 60, "store of weight versions", "full copies and deltas, each with a hash", "grey")
    d.arrow((260, 96), (150, 158), words="prompts", at=(175, 122))
    d.arrow((285, 190), (230, 190), words="calls", at=(258, 181))
    d.arrow((230, 212), (285, 212), words="answers", at=(258, 230))
    d.arrow((500, 96), (615, 158), words="batches", at=(590, 122))
    d.arrow((170, 242), (215, 305), words="graded rollouts", at=(140, 282))
    d.arrow((650, 242), (605, 305), words="publish", at=(655, 280))
    d.arrow((500, 305), (420, 242), words="fetch, in flight", at=(515, 270))
    d.arrow((120, 335), (16, 335), (16, 60), (230, 60), words="resume", at=(66, 328), dashed=True)
    return d


def experts() -> Drawing:
    d = Drawing(
        330, "An expert layer: a router scores eight experts for each token, two compute, their results are added"
    )
    d.box(78, 165, 120, 56, "token", "vector of width D", "grey")
    d.box(240, 165, 120, 66, "router", "8 scores, softmax", "purple")
    chosen = {1: "gate .7", 5: "gate .3"}
    for expert in range(8):
        y = 38 + 36 * expert
        active = expert in chosen
        d.rect(400, y - 14, 130, 28, "blue" if active else "grey", solid=0.3 if active else 0.06)
        d.text(465, y + 5, f"expert {expert}", size=13, kind="" if active else "soft")
        if active:
            d.arrow((300, 165), (400, y), words=chosen[expert], at=(338, 95) if expert == 1 else (368, 185))
            d.arrow((530, y), (620, 165))
    d.box(665, 165, 90, 66, "sum", "gate × result", "orange")
    d.arrow((138, 165), (180, 165))
    d.arrow((710, 165), (748, 165))
    d.text(240, 232, "route = (1, 5)", size=13, kind="bold")
    d.text(240, 252, "recorded by the engine,", size=12, kind="soft")
    d.text(240, 268, "replayed by the trainer;", size=12, kind="soft")
    d.text(240, 284, "gates come from its own scores", size=12, kind="soft")
    return d


def packing() -> Drawing:
    d = Drawing(350, "Packing: three rows side by side without padding, and which token reads which")
    rows, colours, cell = (4, 2, 3), ("blue", "orange", "green"), 28
    d.text(30, 36, "padded: 12 places for 9 tokens", anchor="start", kind="bold")
    d.text(30, 176, "packed: 9 places", anchor="start", kind="bold")
    start = 0
    for row, (length, colour) in enumerate(zip(rows, colours, strict=True)):
        for column in range(max(rows)):
            full = column < length
            d.rect(
                30 + cell * column,
                50 + cell * row,
                cell - 3,
                cell - 3,
                colour if full else "grey",
                solid=0.45 if full else 0.0,
            )
        for column in range(length):
            d.rect(30 + cell * (start + column), 190, cell - 3, cell - 3, colour, solid=0.45)
            d.text(42 + cell * (start + column), 234, str(column), size=12, kind="soft")
        start += length
    d.text(30, 256, "positions begin again in each row;", size=12, anchor="start", kind="soft")
    d.text(30, 272, "all layers but attention see one list", size=12, anchor="start", kind="soft")
    left, top, start = 440, 62, 0
    d.text(left + 126, 36, "who reads whom", kind="bold")
    d.text(left + 126, 54, "token that is read →", size=12, kind="soft")
    for length, colour in zip(rows, colours, strict=True):
        for t in range(9):
            for s in range(start, start + length):
                visible = start <= t < start + length and s <= t
                d.rect(
                    left + cell * s,
                    top + cell * t,
                    cell - 3,
                    cell - 3,
                    colour if visible else "grey",
                    solid=0.45 if visible else 0.03,
                )
        start += length
    d.text(left - 8, top + 20, "reader ↓", size=12, anchor="end", kind="soft")
    d.text(left + 126, top + 272, "a triangle for each row, and nothing between rows", size=12, kind="soft")
    return d


def twin() -> Drawing:
    d = Drawing(280, "A twin: the same test with another expectation, which right code must fail")
    for x, name, code, colour in (
        (265, "hidden test", "assert total([7, 40]) == 47", "green"),
        (570, "its twin", "assert total([7, 40]) == 48", "red"),
    ):
        d.rect(x - 140, 24, 280, 62, colour, solid=0.1)
        d.text(x, 46, name, kind="bold")
        d.text(x, 70, code, kind="code")
    rows = (
        ("right code", "pass", "fail", "accepted"),
        ("wrong code", "fail", "fail", "rejected"),
        ("cheat", "pass", "pass", "caught"),
    )
    for number, (name, first, second, verdict) in enumerate(rows):
        y = 126 + 48 * number
        d.text(110, y + 5, name, anchor="end", kind="bold")
        for x, result in ((265, first), (570, second)):
            d.rect(
                x - 60,
                y - 16,
                120,
                32,
                "green" if result == "pass" else "grey",
                solid=0.28 if result == "pass" else 0.1,
            )
            d.text(x, y + 5, result)
        d.text(418, y + 5, verdict, kind="bold" if verdict == "caught" else "soft")
    d.text(
        380,
        266,
        "The process does not know which of the two it runs. A result that equals everything passes both.",
        size=12,
        kind="soft",
    )
    return d


def spans(ahead: int, sample: float, train: float, batches: int) -> Iterator[tuple[str, int, float, float]]:
    """Yield service, batch, begin and end of a schedule in which sampling runs `ahead` batches before training."""
    engine_free, trained = 0.0, list[float]()
    for batch in range(batches):
        allowed = trained[batch - 1 - ahead] if batch > ahead else 0.0
        begin = max(engine_free, allowed)
        engine_free = begin + sample
        yield "engines", batch, begin, engine_free
        start = max(engine_free, trained[-1] if trained else 0.0)
        trained.append(start + train)
        yield "trainer", batch, start, trained[-1]


def schedule() -> Drawing:
    d = Drawing(335, "Two schedules as timelines: synchronous, and with sampling one batch ahead")
    sample, train, scale, left = 3.0, 2.0, 39.0, 100
    colours = ("blue", "orange", "green", "purple")
    texts = {
        0: ("synchronous", "services.ahead = 0: every batch is sampled from the newest weights; one side always waits"),
        1: (
            "one batch ahead",
            "services.ahead = 1: engines never wait; their weights lack the batch that is in training",
        ),
    }
    for row, (ahead, (name, words)) in enumerate(texts.items()):
        top = 34 + 155 * row
        d.text(20, top, name, anchor="start", kind="bold")
        d.text(150, top, words, anchor="start", size=12, kind="soft")
        for lane, service in enumerate(("engines", "trainer")):
            d.text(left - 10, top + 36 + 42 * lane, service, anchor="end", size=13, kind="soft")
        for service, batch, begin, end in spans(ahead, sample, train, 5):
            begin, end = begin * scale, min(end * scale, 640)
            if begin < 640:
                y = top + 14 + 42 * (service == "trainer")
                d.rect(left + begin, y, end - begin - 2, 34, colours[batch % 4], solid=0.35)
                if end - begin > 30:
                    d.text(
                        left + (begin + end) / 2,
                        y + 22,
                        f"batch {batch + 1}" if end - begin > 60 else str(batch + 1),
                        size=13,
                    )
    d.arrow((left, 318), (left + 640, 318))
    d.text(left - 10, 322, "time", anchor="end", size=12, kind="soft")
    return d


DRAWINGS: tuple[Callable[[], Drawing], ...] = (loop, services, experts, packing, twin, schedule)


def main() -> None:
    for drawing in DRAWINGS:
        (IMAGES / f"{drawing.__name__}.svg").write_text(drawing().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
