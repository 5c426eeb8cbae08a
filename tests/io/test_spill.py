"""The spill directory: where it is, what it refuses, when it goes."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from processes import in_a_forked_child
from strideweave.io import spill as spill_module
from strideweave.io.spill import SPILL_VARIABLE, SpillDirectory, remove_abandoned
from strideweave.runtime.event_loop import current_runtime
from waiting import until


@pytest.fixture
def spill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpillDirectory]:
    monkeypatch.setenv(SPILL_VARIABLE, str(tmp_path))
    spill = SpillDirectory()
    yield spill
    spill.close()


def test_the_directory_is_made_with_the_first_file_for_this_user_alone(
    spill: SpillDirectory, tmp_path: Path
) -> None:
    assert list(tmp_path.iterdir()) == []
    assert spill.statistics().path is None
    file = spill.create(size=100)
    (directory,) = tmp_path.iterdir()
    assert spill.statistics().path == str(directory)
    assert Path(file.path).parent == directory
    assert directory.stat().st_mode & 0o777 == 0o700
    assert Path(file.path).stat().st_mode & 0o777 == 0o600
    assert file.size() == 100
    other = spill.create()
    assert other.path != file.path
    assert spill.statistics().created == 2


def test_without_the_variable_the_systems_temporary_directory_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv(SPILL_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(SPILL_VARIABLE, value)
        spill = SpillDirectory()
        assert Path(spill.create().path).parent.parent == tmp_path
        spill.close()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_place_is_an_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPILL_VARIABLE, "/nonexistent/place")
    with pytest.raises(FileNotFoundError, match=SPILL_VARIABLE) as caught:
        SpillDirectory().create()
    assert caught.value.filename == "/nonexistent/place"


def test_a_file_gets_the_name_that_was_asked_for(spill: SpillDirectory) -> None:
    assert Path(spill.create("weights.bin").path).name == "weights.bin"
    spill.create("spill-0.bin")
    assert Path(spill.create().path).name == "spill-1.bin"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a/", "a\0b"])
def test_a_name_that_is_a_path_is_refused_before_anything_is_made(
    spill: SpillDirectory, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ValueError, match="not a plain file name"):
        spill.create(name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [b"bytes", 3, Path("a")])
def test_a_name_of_another_type_is_refused(spill: SpillDirectory, name: object) -> None:
    with pytest.raises(TypeError, match="must be a str"):
        spill.create(name)  # type: ignore[arg-type]


def test_a_taken_name_is_refused_until_its_file_is_gone(spill: SpillDirectory) -> None:
    file = spill.create("weights.bin", size=8)
    with pytest.raises(ValueError, match=r"a file 'weights.bin' already"):
        spill.create("weights.bin")
    assert file.size() == 8
    file.remove()
    assert spill.create("weights.bin").size() == 0


def test_a_directory_that_a_cleaner_removed_is_made_again(spill: SpillDirectory) -> None:
    first = spill.create(size=4)
    os.pwrite(first.fd, b"abcd", 0)
    Path(first.path).unlink()
    Path(first.path).parent.rmdir()
    second = spill.create("again")
    assert Path(second.path).exists()
    assert os.pread(first.fd, 4, 0) == b"abcd"


def test_closing_removes_everything_and_is_idempotent(spill: SpillDirectory, tmp_path: Path) -> None:
    file = spill.create(size=3)
    (Path(file.path).parent / "left by somebody").write_bytes(b"x")
    spill.close()
    spill.close()
    assert list(tmp_path.iterdir()) == []
    assert spill.statistics().path is None
    file.remove()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_never_removes_its_parents_directory(spill: SpillDirectory, tmp_path: Path) -> None:
    spill.create("kept")
    assert in_a_forked_child(spill.close)
    assert [path.name for path in tmp_path.glob("*/*")] == ["kept"]


PREAMBLE = """
    import os, sys
    from strideweave.io.spill import SpillDirectory
    from strideweave.runtime.event_loop import current_runtime
    create = lambda *a, **k: current_runtime().service(SpillDirectory).create(*a, **k)
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("", 0),
        ("raise RuntimeError('the program failed')", 1),
        ("raise KeyboardInterrupt", -2),
    ],
)
def test_the_directory_is_removed_when_the_interpreter_ends(tmp_path: Path, ending: str, status: int) -> None:
    program = textwrap.dedent(PREAMBLE) + "file = create(size=10)\nprint(file.path)\n" + ending
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, SPILL_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.startswith(str(tmp_path))) == (status, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_multiprocessing_child_removes_its_own_directory_and_leaves_its_parents(
    tmp_path: Path, method: str
) -> None:
    program = textwrap.dedent(PREAMBLE) + textwrap.dedent("""
        import multiprocessing, pathlib, warnings
        def work(parent):
            mine = pathlib.Path(create(size=10).path).parent
            assert str(mine) != parent, "the parent's directory was reused"
        if __name__ == "__main__":
            warnings.simplefilter("ignore", DeprecationWarning)
            parent = pathlib.Path(create("kept").path).parent
            child = multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(str(parent),))
            child.start()
            child.join()
            assert child.exitcode == 0
            print(sorted(path.name for path in parent.parent.glob("*/*")))
    """)
    script = tmp_path / "script.py"
    script.write_text(program)
    place = tmp_path / "place"
    place.mkdir()
    done = subprocess.run(
        [sys.executable, str(script), method],
        env={**os.environ, SPILL_VARIABLE: str(place)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "['kept']\n", "")
    assert list(place.iterdir()) == []


def test_the_runtime_has_one_spill_directory() -> None:
    assert current_runtime().service(SpillDirectory) is current_runtime().service(SpillDirectory)


LEFT = """
    import os, signal, sys
    import numpy as np
    from strideweave import FileBacked
    carrier = FileBacked().new_like(np.zeros(8, np.float32))
    print(os.path.dirname(carrier.path), flush=True)
"""


def left_behind(
    place: Path, ending: str = "os.kill(os.getpid(), signal.SIGKILL)", pass_fds: tuple[int, ...] = ()
) -> Path:
    """The spill directory of a process that was killed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LEFT) + textwrap.dedent(ending)],
        env={**os.environ, SPILL_VARIABLE: str(place)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        pass_fds=pass_fds,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    directory = Path(done.stdout.strip())
    assert [path.name for path in directory.iterdir()] == ["spill-0.bin"]
    return directory


def test_what_a_killed_process_has_left_goes_with_the_next_first_spill(
    spill: SpillDirectory, tmp_path: Path
) -> None:
    left = [left_behind(tmp_path), left_behind(tmp_path)]
    file = spill.create(size=10)
    until(lambda: not any(path.exists() for path in left))
    assert Path(file.path).exists()
    assert len(list(tmp_path.iterdir())) == 1


def test_what_a_living_process_has_stays(spill: SpillDirectory, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LEFT) + "sys.stdin.read()"],
        env={**os.environ, SPILL_VARIABLE: str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        theirs = Path(child.stdout.readline().strip())
        mine = Path(spill.create().path)
        remove_abandoned(tmp_path)
        assert (theirs / "spill-0.bin").exists() and mine.exists()
        child.kill()
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [mine.parent]


def test_what_a_forked_child_still_reads_stays_until_that_has_ended(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    directory = left_behind(
        tmp_path,
        f"""
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        os.closerange(0, 3)
        os.read({reader}, 1)
        os._exit(0 if carrier[7] == 0 else 1)
        """,
        pass_fds=(reader,),
    )
    remove_abandoned(tmp_path)
    assert directory.exists()
    os.write(writer, b"x")
    for end in (reader, writer):
        os.close(end)
    until(lambda: remove_abandoned(tmp_path) or not directory.exists())


def test_what_is_not_certainly_left_behind_stays(tmp_path: Path) -> None:
    """Another machine's, another version's, one that others may enter, a file, a link, and what is called alike."""
    name = left_behind(tmp_path).name
    process, machine, word = re.fullmatch(r"strideweave-(\d+)-([0-9a-f]{8})-(\w+)", name).groups()
    other = f"{int(machine, 16) ^ 1:08x}"
    made = [
        tmp_path / f"strideweave-{process}-{other}-{word}",
        tmp_path / f"strideweave-{process}-{word}",
        tmp_path / f"{name}.backup",
        tmp_path / f"my-{name}",
        tmp_path / f"strideweave-{process}-{machine}-open",
    ]
    for path in made:
        path.mkdir(mode=0o700)
        (path / "thesis.txt").write_text("the only copy")
    made[-1].chmod(0o755)
    file = tmp_path / f"strideweave-{process}-{machine}-file"
    file.write_text("no directory")
    link = tmp_path / f"strideweave-{process}-{machine}-link"
    link.symlink_to(made[0])
    remove_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([*made, file, link])
    assert all((path / "thesis.txt").exists() for path in made)


def test_a_directory_that_is_taken_for_left_behind_before_it_is_locked_is_made_again(
    spill: SpillDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, taken = tempfile.mkdtemp, []

    def mkdtemp(**options: str) -> str:
        path = plain(**options)
        if len(taken) < 2:
            taken.append(path)
            if len(taken) == 1:
                remove_abandoned(tmp_path)
            else:
                held.append(spill_module._locked(path))
        return path

    held: list[object] = []
    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    file = spill.create(size=10)
    assert len(taken) == 2 and str(Path(file.path).parent) not in taken
    assert not Path(taken[0]).exists()
    held.clear()
    remove_abandoned(tmp_path)
    # Or the worker that spill.create has sent out to clean has it just now.
    until(lambda: list(tmp_path.iterdir()) == [Path(file.path).parent])


def test_where_directories_cannot_be_locked_nothing_is_removed(
    spill: SpillDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_behind(tmp_path)

    def flock(number: int, operation: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr("strideweave.io.file_lock.fcntl.flock", flock)
    assert Path(spill.create().path).exists()
    remove_abandoned(tmp_path)
    assert left.exists()


def test_two_cleaners_at_once_do_not_hinder_each_other(tmp_path: Path) -> None:
    first = left_behind(tmp_path)
    left = [first, *[first.with_name(f"{first.name}{letter}") for letter in "ab"]]
    for path in left[1:]:
        path.mkdir(mode=0o700)
    for number in range(2000):
        (left[number % 3] / str(number)).touch()
    threads = [threading.Thread(target=remove_abandoned, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(tmp_path.iterdir()) == []
