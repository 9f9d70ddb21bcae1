"""The corpus: the same for the same sources, built once, never half there, rebuilt when damaged."""

from __future__ import annotations

import multiprocessing
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from fireflyer.base.errors import DataCorruption, NotFound, UsageError
from fireflyer.data import END_OF_TEXT
from fireflyer.recipes.corpus import Corpus, build_corpus, open_corpus

FILES = {
    "a.py": "def add(left, right):\n    return left + right\n",
    "package/b.py": "class Thing:\n    '''Ünïcode.'''\n",
    "package/empty.py": "",
    "z.py": "print('the end')\n",
}
SKIPPED = ("test/test_a.py", "package/tests/test_b.py", "site-packages/c.py", "__pycache__/d.py", "readme.txt")


@pytest.fixture
def source(tmp_path: Path) -> str:
    root = tmp_path / "source"
    for name in (*FILES, *SKIPPED):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FILES.get(name, "skipped = True\n"))
    return str(root)


def build(tmp_path: Path, source: str, **options: int) -> Corpus:
    return build_corpus(str(tmp_path / "corpus"), source=source, **({"vocab_size": 280} | options))


def texts(corpus: Corpus) -> list[str]:
    tokenizer = corpus.tokenizer()
    with corpus.records() as records:
        rows = [records.array(number, np.dtype("<u2")) for number in range(len(records))]
    assert all(row[-1] == END_OF_TEXT for row in rows)
    return [tokenizer.decode_text(row) for row in rows]


def test_each_source_file_is_a_record_of_its_tokens(tmp_path: Path, source: str) -> None:
    corpus = build(tmp_path, source)
    assert texts(corpus) == [FILES[name] for name in sorted(FILES)]
    assert corpus.files == len(FILES)
    assert corpus.source_bytes == sum(len(text.encode()) for text in FILES.values())
    assert corpus.tokens == sum(len(row) // 2 for row in corpus.records())
    assert corpus.vocab_size == corpus.tokenizer().vocab_size
    assert "4 files" in str(corpus)


def test_the_same_sources_are_built_once(tmp_path: Path, source: str) -> None:
    first = build(tmp_path, source)
    again = build(tmp_path, source)
    assert (first.reused, again.reused) == (False, True)
    assert (first.directory, first.tokens) == (again.directory, again.tokens)
    elsewhere = build_corpus(str(tmp_path / "elsewhere"), source=source, vocab_size=280)
    for name in ("tokenizer.json", "shard-00000.ffr"):
        assert Path(first.directory, name).read_bytes() == Path(elsewhere.directory, name).read_bytes()


def test_other_sources_or_options_make_another_corpus_and_leave_the_old_one(tmp_path: Path, source: str) -> None:
    corpora = [build(tmp_path, source), build(tmp_path, source, vocab_size=270), build(tmp_path, source, max_bytes=70)]
    Path(source, "z.py").write_text("print('the End')\n")
    corpora.append(build(tmp_path, source))
    assert len({corpus.directory for corpus in corpora}) == 4
    assert not any(corpus.reused for corpus in corpora)
    assert texts(corpora[0])[-1] == FILES["z.py"]
    assert corpora[2].source_bytes <= 70
    assert open_corpus(str(tmp_path / "corpus")).directory == corpora[-1].directory


def test_a_damaged_corpus_is_built_again(tmp_path: Path, source: str) -> None:
    corpus = build(tmp_path, source)
    whole = {path.name: path.read_bytes() for path in Path(corpus.directory).iterdir()}
    for name, content in whole.items():
        for damaged in (content[:-1], content[:20] + bytes([content[20] ^ 1]) + content[21:], None):
            path = Path(corpus.directory, name)
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            rebuilt = build(tmp_path, source)
            assert not rebuilt.reused, name
            assert texts(rebuilt) == texts(corpus)


def test_debris_of_a_dead_builder_is_cleared(tmp_path: Path, source: str) -> None:
    debris = tmp_path / "corpus" / ".building"
    debris.mkdir(parents=True)
    (debris / "shard-00000.ffr").write_bytes(b"half")
    corpus = build(tmp_path, source)
    assert len(texts(corpus)) == len(FILES)
    assert not debris.exists()


def build_in_process(directory: str, source: str, answers: multiprocessing.SimpleQueue[bool]) -> None:
    answers.put(build_corpus(directory, source=source, vocab_size=280).reused)


def test_of_several_builders_at_once_one_builds(tmp_path: Path, source: str) -> None:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.SimpleQueue[bool] = context.SimpleQueue()
    arguments = (str(tmp_path / "corpus"), source, answers)
    processes = [context.Process(target=build_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    assert sorted(answers.get() for _ in processes) == [False, True, True]
    for process in processes:
        process.join()


def test_the_standard_library_is_found(tmp_path: Path) -> None:
    corpus = build_corpus(str(tmp_path), max_bytes=200_000)
    assert 190_000 < corpus.source_bytes <= 200_000
    assert corpus.vocab_size == 1024
    assert corpus.source_bytes / corpus.tokens > 2
    assert texts(corpus)[0] == Path(sysconfig.get_paths()["stdlib"], "__future__.py").read_text()


def test_what_cannot_be_built_or_opened_says_why(tmp_path: Path, source: str) -> None:
    with pytest.raises(NotFound, match="no Python sources"):
        build_corpus(str(tmp_path / "corpus"), source=str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="max_bytes=0"):
        build(tmp_path, source, max_bytes=0)
    with pytest.raises(UsageError, match="vocab_size=10"):
        build(tmp_path, source, vocab_size=10)
    with pytest.raises(NotFound):
        open_corpus(str(tmp_path / "corpus"))
    assert not build(tmp_path, source).reused
    current = tmp_path / "corpus" / "current.json"
    for content in (b"", b'{"name": "../source"}', b'{"name": "corpus-../../source"}', b'{"name": 3}'):
        current.write_bytes(content)
        with pytest.raises(DataCorruption, match=r"current\.json: "):
            open_corpus(str(tmp_path / "corpus"))
    current.write_bytes(b'{"name": "corpus-gone"}')
    with pytest.raises(NotFound):
        open_corpus(str(tmp_path / "corpus"))
