"""Draws docs/learn/drawings/*.svg: a drawing for each step, legible on light and dark pages.

Each drawing has a pale panel of its own. --check changes nothing, and fails if a file differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "learn" / "drawings"
BLUE, ORANGE, GREEN, GREY, INK = "#3f6fb0", "#b8651b", "#3b7d55", "#cdd2d8", "#24292f"
CELL = 14
WIDTH = 640

Point = tuple[float, float]


class Drawing:
    """Shapes and words on a pale panel."""

    def __init__(self, title: str, height: int) -> None:
        self.title = title
        self.height = height
        self.shapes: list[str] = []

    def rectangles(self, corners: Iterable[Point], color: str, w: float, h: float) -> None:
        """Equal rectangles, one path."""
        path = "".join(f"M{x:g} {y:g}h{w:g}v{h:g}h{-w:g}z" for x, y in corners)
        self.shapes.append(f'<path fill="{color}" d="{path}"/>')

    def cells(self, at: Point, columns: int, rows: int, color: str, size: int = CELL) -> None:
        """A grid of square cells."""
        x, y = at
        corners = [(x + i * size, y + j * size) for j in range(rows) for i in range(columns)]
        self.rectangles(corners, color, size - 2, size - 2)

    def box(self, at: Point, w: float, h: float, color: str, words: str) -> None:
        """A rectangle with words in its middle."""
        self.rectangles([at], color, w, h)
        ink = INK if color == GREY else "#fff"
        self.words((at[0] + w / 2, at[1] + h / 2 + 4), words, "middle", ink)

    def words(self, at: Point, words: str, anchor: str = "start", color: str = INK) -> None:
        """A line of text."""
        place = f'x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}" fill="{color}"'
        self.shapes.append(f"<text {place}>{escape(words)}</text>")

    def arrows(self, lines: Iterable[tuple[float, float, float, float]], color: str = INK) -> None:
        """Arrows."""
        path = "".join(f'<path d="M{a:g} {b:g}L{c:g} {d:g}"/>' for a, b, c, d in lines)
        self.shapes.append(f'<g stroke="{color}" marker-end="url(#head)">{path}</g>')

    def svg(self) -> str:
        """The file."""
        size = f'viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}"'
        style = 'role="img" font-family="sans-serif" font-size="12"'
        return f"""\
<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>
<title>{escape(self.title)}</title>
<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6"
orient="auto"><path fill="{INK}" d="M0 0L8 4L0 8z"/></marker>
<rect width="{WIDTH}" height="{self.height}" rx="8" fill="#f6f7f4"/>
{chr(10).join(self.shapes)}
</svg>
"""


def row(at: Point, count: int, size: int = CELL) -> list[float]:
    """The middles of a row of cells."""
    return [at[0] + i * size + (size - 2) / 2 for i in range(count)]


def square_1() -> Drawing:
    """An element per thread."""
    d = Drawing("Each thread reads and writes one element; the last threads have none", 130)
    d.words((20, 29), "x")
    d.words((20, 113), "y")
    d.cells((50, 18), 26, 1, BLUE)
    d.cells((50, 102), 26, 1, GREEN)
    for block in range(2):
        d.box((50 + block * 16 * CELL, 55), 16 * CELL - 4, 22, ORANGE, f"block {block}: 16 threads")
    centers = row((50, 0), 26)
    d.arrows([(x, 32, x, 52) for x in centers] + [(x, 79, x, 99) for x in centers])
    d.words((50 + 27 * CELL, 98), "6 threads without an element")
    return d


def square_2() -> Drawing:
    """A vector per thread."""
    d = Drawing("Each thread reads and writes four adjacent elements in one access", 130)
    d.words((20, 29), "x")
    d.words((20, 113), "y")
    for i in range(8):
        x = 50 + i * 4 * (CELL + 1)
        d.cells((x, 18), 4, 1, BLUE)
        d.cells((x, 102), 4, 1, GREEN)
        d.box((x, 55), 4 * CELL - 4, 22, ORANGE, f"{i}")
        d.arrows([(x + 27, 32, x + 27, 52), (x + 27, 79, x + 27, 99)])
    d.words((540, 70), "threads")
    return d


def fusion_1() -> Drawing:
    """Three passes."""
    d = Drawing("Three kernels: every result goes to memory and comes back", 150)
    d.box((30, 110), 580, 26, GREY, "memory: 3 reads and 3 writes of a whole tensor")
    for i, name in enumerate(("multiply", "add", "relu")):
        x = 70 + i * 190
        d.box((x, 25), 120, 30, BLUE, name)
        d.arrows([(x + 25, 108, x + 25, 57), (x + 95, 57, x + 95, 108)])
    return d


def fusion_2() -> Drawing:
    """One pass."""
    d = Drawing("One kernel: the results between the operations stay in registers", 150)
    d.box((30, 110), 580, 26, GREY, "memory: 1 read and 1 write of a whole tensor")
    d.box((70, 25), 500, 30, GREEN, "multiply, add, relu in registers")
    d.arrows([(95, 108, 95, 57), (545, 57, 545, 108)])
    return d


def reduction_1() -> Drawing:
    """Atomics."""
    d = Drawing("All threads add to one address, so they take turns", 120)
    d.cells((50, 18), 36, 1, BLUE)
    d.box((260, 80), 100, 24, ORANGE, "result")
    d.arrows([(x, 32, 310 + (x - 310) * 0.15, 78) for x in row((50, 0), 36)[::2]])
    d.words((380, 96), "one addition at a time")
    return d


def reduction_2() -> Drawing:
    """A tree."""
    d = Drawing("Half of the threads add the other half, until one number is left", 170)
    count, y = 16, 18
    while count:
        d.cells((60, y), count, 1, GREEN if count == 1 else BLUE)
        d.words((330, y + 11), f"{count} numbers" if count > 1 else "one sum: one atomic per block")
        if count > 1:
            centers = row((60, 0), count)
            half = count // 2
            d.arrows([(centers[i + half], y + 14, centers[i] + 2, y + 31) for i in range(half)])
        count, y = count // 2, y + 33
    return d


def reduction_3() -> Drawing:
    """Exchanges between lanes."""
    d = Drawing("Lanes exchange registers over halved distances; all lanes get the sum", 190)
    for step, distance in enumerate((4, 2, 1)):
        y = 18 + step * 50
        d.cells((60, y), 8, 1, BLUE, 30)
        d.words((330, y + 19), f"distance {distance}")
        centers = row((60, 0), 8, 30)
        d.arrows([(centers[i], y + 30, centers[i ^ distance], y + 47) for i in range(8)])
    d.cells((60, 168), 8, 1, GREEN, 30)
    d.shapes[-1] = d.shapes[-1].replace("v28", "v16")
    d.words((330, 180), "the sum, in every lane")
    return d


def reduction_4() -> Drawing:
    """Loads in flight."""
    d = Drawing("A thread requests four vectors, a grid apart, before it adds the first", 120)
    for part in range(4):
        x = 50 + part * 140
        d.cells((x, 20), 9, 1, GREY)
        d.cells((x + CELL, 20), 4, 1, BLUE)
        d.arrows([(x + 3 * CELL, 34, 280 + part * 15, 76)])
    d.box((240, 78), 120, 26, ORANGE, "thread 1")
    d.words((375, 96), "4 loads of 16 bytes in flight")
    return d


def reduction_5() -> Drawing:
    """The last block."""
    d = Drawing("Each block stores its part; the block that ends last adds all parts in order", 150)
    for i in range(5):
        x = 40 + i * 90
        d.box((x, 18), 76, 24, GREEN if i == 2 else BLUE, f"block {i}")
        d.arrows([(x + 38, 44, x + 38, 62)])
        d.box((x, 64), 76, 20, GREY, f"part {i}")
        d.arrows([(x + 38, 86, 228 + i * 12, 108)])
    d.box((180, 110), 144, 24, GREEN, "block 2, ended last")
    d.words((340, 127), "part 0 + part 1 + ...: always in this order")
    return d


def norm_1() -> Drawing:
    """A thread per row."""
    d = Drawing("A thread walks along a row: at any time a warp reads a column", 130)
    d.cells((150, 16), 28, 7, GREY)
    d.cells((150 + 5 * CELL, 16), 1, 7, BLUE)
    for i in range(7):
        d.words((60, 27 + i * CELL), f"thread {i}")
        d.arrows([(120, 22 + i * CELL, 145, 22 + i * CELL)])
    d.words((550, 60), "far apart")
    d.words((550, 76), "in memory")
    return d


def norm_2() -> Drawing:
    """A block per row."""
    d = Drawing("The threads of a block read adjacent elements, then the next ones", 110)
    d.cells((60, 20), 36, 1, GREY)
    d.cells((60, 20), 12, 1, BLUE)
    d.cells((60 + 12 * CELL, 20), 12, 1, ORANGE)
    d.arrows([(x, 60, x, 36) for x in row((60, 0), 12)])
    d.words((60, 76), "threads 0 to 11, first round")
    d.words((60 + 12 * CELL, 52), "second round")
    d.words((60, 98), "sums: registers, then shuffles in a warp, then shared memory")
    return d


def norm_3() -> Drawing:
    """Vectors."""
    d = Drawing("An access of 16 bytes brings eight elements of half precision", 96)
    for i in range(5):
        x = 50 + i * 8 * CELL
        d.cells((x, 20), 8, 1, BLUE if i % 2 else ORANGE)
        d.words((x + 4 * CELL, 56), f"thread {i}", "middle")
    d.words((50, 82), "an eighth of the instructions; a load of a warp requests 512 bytes")
    return d


def norm_4() -> Drawing:
    """The row in registers."""
    d = Drawing("The row is read once and stays in registers until it is written", 140)
    d.box((30, 100), 580, 24, GREY, "memory: one read, one write")
    d.box((60, 20), 520, 26, BLUE, "the row in the registers of a block")
    d.arrows([(90, 98, 90, 48), (550, 48, 550, 98)])
    for x, name in ((150, "mean"), (270, "squares"), (390, "result")):
        d.box((x, 60), 100, 22, GREEN, name)
        d.arrows([(x + 50, 47, x + 50, 58)])
    return d


def norm_5() -> Drawing:
    """Merged moments."""
    d = Drawing("Count, mean and squares of two parts merge into those of both", 150)
    for i in range(4):
        x = 40 + i * 145
        d.box((x, 18), 125, 24, BLUE, f"part {i}: n, mean, q")
    for i in range(2):
        x = 112 + i * 290
        d.box((x, 64), 126, 24, ORANGE, "n, mean, q")
        d.arrows([(x - 10, 44, x + 40, 62), (x + 136, 44, x + 86, 62)])
    d.box((257, 110), 126, 24, GREEN, "of the row")
    d.arrows([(175, 90, 290, 108), (465, 90, 350, 108)])
    return d


def factors(d: Drawing, a: Point, b: Point, c: Point) -> None:
    """Grids of a, b and c, with their names."""
    for at, name in ((a, "a"), (b, "b"), (c, "c")):
        d.words((at[0], at[1] - 6), name)
        d.cells(at, 12, 12, GREY, 10)


def product_1() -> Drawing:
    """A row of each factor for one result."""
    d = Drawing("One result needs a row of a and a row of b", 160)
    factors(d, (60, 28), (250, 28), (460, 28))
    d.cells((60, 68), 12, 1, BLUE, 10)
    d.cells((250, 98), 12, 1, ORANGE, 10)
    d.cells((530, 68), 1, 1, GREEN, 10)
    d.words((203, 90), "times")
    d.arrows([(385, 88, 450, 88)])
    return d


def product_2() -> Drawing:
    """Tiles."""
    d = Drawing("A block computes a tile of c from tiles of a and b in shared memory", 160)
    factors(d, (60, 28), (250, 28), (460, 28))
    for i, color in enumerate((BLUE, "#86a9d8")):
        d.cells((60 + 40 * i, 68), 4, 4, color, 10)
        d.cells((250 + 40 * i, 28), 4, 4, (ORANGE, "#edb77f")[i], 10)
    d.cells((460, 68), 4, 4, GREEN, 10)
    d.arrows([(90, 120, 150, 120), (280, 80, 340, 80), (385, 88, 450, 88)])
    return d


def product_3() -> Drawing:
    """An outer product in registers."""
    d = Drawing("8 numbers of a and 8 of b give 64 products, all in one thread", 180)
    d.cells((200, 40), 1, 8, BLUE, 16)
    d.cells((230, 14), 8, 1, ORANGE, 16)
    d.cells((230, 40), 8, 8, GREEN, 16)
    d.words((190, 108), "from a", "end")
    d.words((370, 26), "from b")
    d.words((370, 90), "64 sums in registers")
    d.words((370, 112), "16 reads for 64 products: 4 per read")
    return d


def product_4() -> Drawing:
    """The instruction of a warp."""
    d = Drawing("A warp multiplies 16 x 16 by 16 x 8; the dark cells are those of thread 0", 220)
    d.words((40, 22), "A: 16 x 16")
    d.cells((40, 30), 16, 16, "#b9cde8", 11)
    d.words((260, 22), "B, as rows of k: 8 x 16")
    d.cells((260, 30), 16, 8, "#f1cfa5", 11)
    d.words((480, 22), "sums: 16 x 8")
    d.cells((480, 30), 8, 16, "#bcdac8", 11)
    for r, c in ((0, 0), (8, 0), (0, 8), (8, 8)):
        d.cells((40 + c * 11, 30 + r * 11), 2, 1, BLUE, 11)
    for c in (0, 8):
        d.cells((260 + c * 11, 30), 2, 1, ORANGE, 11)
    for r in (0, 8):
        d.cells((480, 30 + r * 11), 2, 1, GREEN, 11)
    d.words((260, 150), "thread t, in each block of 8 x 8:")
    d.words((260, 168), "row t / 4, column 2 (t % 4)")
    d.words((260, 186), "and the next column")
    return d


def product_5() -> Drawing:
    """Copies and products over time."""
    d = Drawing("While a step is multiplied, the next three are being copied", 150)
    for i in range(5):
        x = 60 + i * 6 if i < 3 else 235 + (i - 3) * 96
        d.box((x, 20 + i % 3 * 26), 155, 22, BLUE, f"copy of step {i}")
    for i in range(4):
        d.box((235 + i * 96, 104), 90, 24, GREEN, f"multiply {i}")
    d.words((20, 145), "time")
    d.arrows([(50, 141, 620, 141)])
    return d


def product_6() -> Drawing:
    """Producer, ring and consumers."""
    d = Drawing("One thread requests boxes; two groups of 128 threads multiply from the ring", 170)
    d.box((20, 60), 110, 40, ORANGE, "producer")
    d.words((75, 116), "1 thread, TMA", "middle")
    for i in range(4):
        d.box((180 + i * 66, 60), 60, 40, BLUE, f"stage {i}")
    d.box((490, 30), 130, 40, GREEN, "group 0")
    d.box((490, 95), 130, 40, GREEN, "group 1")
    d.words((555, 152), "wgmma: 64 x 256 each", "middle")
    d.arrows([(132, 74, 176, 74), (446, 72, 486, 54), (446, 88, 486, 110)])
    d.words((310, 50), "full: the bytes have arrived", "middle")
    d.words((310, 122), "empty: both groups have read", "middle")
    d.arrows([(486, 128, 100, 128)])
    return d


def fp8_1() -> Drawing:
    """A scale per block."""
    d = Drawing("128 elements share a scale: the smallest power of two that makes them fit", 110)
    for i in range(3):
        x = 40 + i * 190
        d.cells((x, 18), 13, 1, BLUE)
        d.box((x, 72), 110, 22, GREEN, "128 bytes")
        d.box((x + 118, 72), 60, 22, ORANGE, "scale")
        d.arrows([(x + 88, 34, x + 55, 70), (x + 88, 34, x + 148, 70)])
    return d


DRAWINGS: tuple[Callable[[], Drawing], ...] = (
    *(square_1, square_2, fusion_1, fusion_2),
    *(reduction_1, reduction_2, reduction_3, reduction_4, reduction_5),
    *(norm_1, norm_2, norm_3, norm_4, norm_5),
    *(product_1, product_2, product_3, product_4, product_5, product_6, fp8_1),
)


def main(given: Sequence[str] | None = None) -> int:
    """Writes or checks the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 where it differs")
    check = parser.parse_args(given).check
    differs = 0
    for draw in DRAWINGS:
        path, text = FOLDER / f"{draw.__name__}.svg", draw().svg()
        if check and (not path.is_file() or path.read_text(encoding="utf-8") != text):
            differs = 1
            print(f"{path.name} differs: type python docs/learn_drawings.py", file=sys.stderr)
        elif not check:
            path.write_text(text, encoding="utf-8")
    return differs


if __name__ == "__main__":
    sys.exit(main())
