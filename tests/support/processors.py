"""What Linux says of processors, to be put in the place of the real one's."""

from pathlib import Path

LINES = "processor\t: 0\nmodel name\t: Made-up\nflags\t\t: fpu sse2 avx512f{}\n\n"


def processor(folder: Path, native: bool) -> Path:
    """A file that tells of two cores, which compute with bfloat16 numbers or convert them."""
    file = folder / "cpuinfo"
    file.write_text(LINES.format(" avx512_bf16" if native else "") * 2)
    return file
