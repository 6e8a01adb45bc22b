"""`python -m app.build_statistics`, the whole command, with the embedded model's tokenizer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.build_statistics import main
from storage.statistics import SUFFIX, StatisticsTable
from tests.conftest import EMBEDDED


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("The cat sat on the mat. " * 40)
    return path


@pytest.mark.model
def test_the_command_builds_a_file_that_drafts(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], embedded
) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "data"
    status = main([str(texts), "--model", str(EMBEDDED), "--data-dir", str(folder)])
    assert status == 0
    fingerprint = embedded.info.tokenizer_fingerprint
    path = folder / "statistics" / f"{fingerprint}{SUFFIX}"
    assert [child for child in folder.rglob("*") if child.is_file()] == [path]
    table = StatisticsTable(path)
    assert f"{int(table.meta['keys']):,} keys" in capsys.readouterr().out
    assert table.meta["tokenizer"] == fingerprint and table.meta["title"] == "texts.txt"
    tokens = embedded.tokenize(" cat sat on the mat.")
    found = table.look_up(tokens[:1])
    assert found is not None and found.counts == {tokens[1]: found.total}
    for at in range(3, len(tokens)):
        found = table.look_up(tokens[at - 3 : at])
        assert found is not None and list(found.counts) == [tokens[at]]
    table.close()


@pytest.mark.gguf
@pytest.mark.model
def test_a_file_and_a_folder_of_one_tokenizer_share_their_statistics(
    texts: Path, tmp_path: Path
) -> None:
    contents = []
    for name, source in (("folder", EMBEDDED), ("file", EMBEDDED.with_suffix(".gguf"))):
        assert main([str(texts), "--model", str(source), "--data-dir", str(tmp_path / name)]) == 0
        (made,) = (tmp_path / name / "statistics").iterdir()
        contents.append((made.name, made.read_bytes()))
    assert contents[0] == contents[1]


@pytest.mark.model
def test_mistakes_end_with_status_2_and_leave_nothing(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "a.db"
    for arguments, words in [
        (["missing.txt", "--model", str(EMBEDDED), "--out", str(out)], "missing.txt"),
        ([str(texts), "--model", str(tmp_path / "none"), "--out", str(out)], "does not exist"),
        ([str(texts), "--model", str(EMBEDDED), "--out", str(texts / "a.db")], "written"),
    ]:
        assert main(arguments) == 2
        errors = capsys.readouterr().err
        assert words in errors and "Traceback" not in errors
    assert [child.name for child in tmp_path.iterdir()] == ["texts.txt"]


@pytest.mark.model
def test_an_interrupted_command_leaves_the_old_file(
    texts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "a.db"
    out.write_bytes(b"the old one")

    def interrupted(*arguments: object) -> Iterator[tuple[int, bytes]]:
        yield 1, b""
        raise KeyboardInterrupt

    monkeypatch.setattr("storage.statistics_build.rows", interrupted)
    assert main([str(texts), "--model", str(EMBEDDED), "--out", str(out)]) == 130
    assert "Cancelled" in capsys.readouterr().err
    assert out.read_bytes() == b"the old one"
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a.db", "texts.txt"]
