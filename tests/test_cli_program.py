"""The command line's manners: exit statuses, errors in one line, completion, interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

typer = pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("xxhash")

from typer.testing import CliRunner  # noqa: E402

from strideweave.cli import app  # noqa: E402
from strideweave.cli.values import parse_dtype, parse_extents  # noqa: E402
from strideweave.dtype import DType  # noqa: E402

PROGRAM = (sys.executable, "-W", "error", "-m", "strideweave")


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def array(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.arange(64, dtype=np.float32).reshape(8, 8))
    return tmp_path / "a.npy"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "No such command"),
        (["pack"], "SRC"),
        (["pack", "a", "b", "--what"], "--what"),
        (["inspect", "nowhere"], "'nowhere': No such file or directory"),
        (["verify", "nowhere"], "'nowhere': No such file or directory"),
        (["pack", "nowhere", "there"], "'nowhere': No such file or directory"),
        (["bench", "nowhere"], "'nowhere': No such file or directory"),
        (["trace", "nowhere"], "nowhere"),
        (["inspect", "a.npy", "--tile-shape", "three"], "no extents"),
        (["inspect", "a.npy", "--tile-shape", "3,8"], "do not cut"),
        (["inspect", "a.npy", "--dtype", "complex"], "no element type"),
        (["inspect", "a.npy", "--format", "hdf5"], "format must be one of"),
        (["inspect", "a.npy", "--tensor", "x"], "leave --tensor out"),
        (["inspect", "a.txt"], "store, zarr, and for a raw file --dtype and --shape"),
        (["inspect", "a.txt"], "pass --format, one of npy"),
        (["bench", "a.npy", "--turns", "0"], "--turns"),
        (["bench", "--size", "9" * 400], "more bytes than a file can have"),
        (["bench", "--size", "1e99"], "not a number of bytes"),
        (["bench", "--size", "7000000000GiB"], "are free, less than the"),
        (["trace", "."], "no regular file"),
    ],
)
@pytest.mark.parametrize("flag", [[], ["--json"]])
def test_what_cannot_be_used_is_one_line_and_2(array, monkeypatch, arguments, flag, said):
    monkeypatch.chdir(array.parent)
    (array.parent / "a.txt").write_text("hello", "utf-8")
    result = run(*arguments, *flag)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("strideweave")
    assert said in line


@pytest.mark.parametrize("command", ["inspect", "pack", "bench"])
@pytest.mark.parametrize("flag", [[], ["--json"]])
def test_a_damaged_file_is_one_line_and_1(array, command, flag):
    array.write_bytes(array.read_bytes()[:-1])
    target = [array.parent / "store"] if command == "pack" else []
    result = run(command, array, *target, *flag)
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "the size does not match the shape" in line
    assert [path.name for path in array.parent.iterdir()] == ["a.npy"]


def test_no_arguments_show_the_help():
    result = run()
    assert result.exit_code == 2
    assert "pack" in result.stdout


@pytest.mark.parametrize("command", ["pack", "inspect", "verify", "bench", "demo", "trace"])
def test_every_command_has_json_and_says_its_exit_status(command):
    shown = " ".join(run(command, "--help").stdout.replace("│", " ").split())
    assert "--json" in shown
    assert "Exit status: 0" in shown


@pytest.mark.parametrize("command", ["pack", "inspect", "verify", "bench", "demo", "trace"])
def test_the_paragraphs_of_a_help_are_lines_that_the_terminal_wraps(command):
    paragraphs = typer.main.get_command(app).commands[command].help.split("\n\n")
    assert paragraphs[-1].startswith("Exit status: 0")
    assert not any("\n" in paragraph for paragraph in paragraphs)


def test_a_checkpoint_of_many_tensors_is_not_damaged_where_none_was_named(tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file({"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}, tmp_path / "two.safetensors")
    result = run("pack", tmp_path / "two.safetensors", tmp_path / "store")
    assert result.exit_code == 2
    assert "holds 2 tensors; --tensor must say which one; there are 'a', 'b'" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["two.safetensors"]


def test_extents_and_dtypes_are_read():
    assert [parse_extents(text) for text in ("8", "8,4", "8x4", "(8, 4)", "8,")] == [
        *((8,), (8, 4), (8, 4), (8, 4), (8,))
    ]
    assert parse_extents(None) is parse_dtype(None) is None
    for text in ("", "-1", "8,,4", "8.5", "eight"):
        with pytest.raises(typer.BadParameter):
            parse_extents(text)
    for text, dtype in (
        *(("bfloat16", DType.BFloat16), ("FLOAT32", DType.Float32), ("f4", DType.Float32)),
        *(("<i2", DType.Int16), ("u1", DType.UInt8), ("bool", DType.Bool)),
    ):
        assert parse_dtype(text) is dtype
    for text in (
        "",
        "complex",
        ">f4",
        "S4",
        "O",
        "f4,f4",
        "(2,)f4",
        "f99",
        "{",
        "a:b",
        "datetime64",
        "\0",
        "é",
    ):
        with pytest.raises(typer.BadParameter, match="no element type"):
            parse_dtype(text)


def complete(words: str, folder: Path) -> list[str]:
    environment = {
        **os.environ,
        "_STRIDEWEAVE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    ended = subprocess.run(
        PROGRAM, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return ended.stdout.split()


def test_names_are_completed(tmp_path: Path):
    header = json.dumps({"blocks.0.w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    assert complete("strideweave ver", tmp_path) == ["verify"]
    assert complete("strideweave inspect a.safetensors --tensor bl", tmp_path) == ["blocks.0.w"]
    assert complete("strideweave inspect missing --tensor bl", tmp_path) == []
    assert complete("strideweave pack a b --dtype Fl", tmp_path)[-2:] == ["Float32", "Float64"]
    assert complete("strideweave pack a b --format z", tmp_path) == ["zarr"]
    assert complete("strideweave inspect a.sa", tmp_path) == []  # the shell's own file names follow


def test_the_shell_can_be_told(monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    ended = subprocess.run(
        [*PROGRAM, "--show-completion", "bash"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "complete -o default -F _strideweave_completion strideweave" in ended.stdout


@pytest.mark.parametrize(
    "command", [["--help"], ["pack", "--help"], ["--version"], [], ["inspect"], ["inspect", "--json"]]
)
def test_a_reader_that_has_gone_is_141_and_no_word(array: Path, command: list[str]):
    arguments = [*command, array] if "inspect" in command else command
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [*PROGRAM, *arguments], stdout=writer, stderr=subprocess.PIPE, check=False, timeout=60
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


# Who runs tests in the background may have told them to ignore interruptions, and a program inherits that.
HEEDS_INTERRUPTS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_an_interrupted_pack_ends_with_130_and_leaves_nothing(disk_path: Path):
    source = disk_path / "zeros.bin"
    with source.open("wb") as file:
        file.truncate(2 << 30)  # sparse, and more than can be packed before the interruption
    command = [*PROGRAM, "pack", source, disk_path / "store", "--dtype", "uint8", "--shape", "2048,1048576"]
    command = [sys.executable, "-c", HEEDS_INTERRUPTS, *command]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not any(path.name.endswith(".saving") for path in disk_path.iterdir()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "strideweave pack: interrupted\n"
    assert [path.name for path in disk_path.iterdir()] == ["zeros.bin"]


def test_a_full_disk_is_one_line_and_2_and_leaves_nothing(tmp_path: Path):
    np.zeros((64, 1 << 16), np.uint8).tofile(tmp_path / "zeros.bin")
    command = [*PROGRAM, "pack", "zeros.bin", "store", "--dtype", "uint8", "--shape", "64,65536"]
    limited = ["bash", "-c", 'ulimit -f 1024; exec "$@"', "bash", *command]  # blocks of 1024 bytes
    ended = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("strideweave pack: ")
    assert [path.name for path in tmp_path.iterdir()] == ["zeros.bin"]


@pytest.mark.parametrize("flag", [[], ["--json"]])
def test_a_bar_is_for_terminals_and_for_people(array: Path, flag: list[str]):
    pty = pytest.importorskip("pty")
    store = array.parent / "store"
    assert run("pack", array, store, "--tile-shape", "1,8").exit_code == 0
    leader, follower = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    ended = subprocess.run(
        [*PROGRAM, "verify", store, *flag],
        stdout=subprocess.PIPE,
        stderr=follower,
        env=environment,
        text=True,
        check=True,
        timeout=60,
    )
    os.close(follower)
    os.set_blocking(leader, False)
    try:
        shown = os.read(leader, 1 << 16).decode()
    except OSError:  # nothing was written, and nobody is left to
        shown = ""
    os.close(leader)
    assert ("verifying store" in shown) is (not flag)
    assert ("verifying" in ended.stdout) is False


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_of_any_kind_are_shown_and_obeyed_by_no_terminal(tmp_path: Path, encoding: str):
    names = ["\x1b[31mred\nline", "\ud800half", "caf\u00e9"]
    one = {"dtype": "U8", "shape": [1]}
    header = {name: one | {"data_offsets": [n, n + 1]} for n, name in enumerate(names)}
    text = json.dumps(header).encode()
    checkpoint = tmp_path / "m.safetensors"
    checkpoint.write_bytes(len(text).to_bytes(8, "little") + text + bytes(len(names)))
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    ended = subprocess.run(
        [*PROGRAM, "inspect", checkpoint], env=environment, capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert rb"\x1b[31mred\nline" in ended.stdout
    assert rb"\ud800half" in ended.stdout
    assert b"caf" in ended.stdout
    assert b"\x1b" not in ended.stdout
    assert len(ended.stdout.splitlines()) == 2 + 1 + len(names)


def test_a_path_that_is_no_utf_8_is_a_path(array: Path):
    store = os.fsencode(array.parent) + b"/st\xff.store"
    for command in (["pack", os.fsencode(array), store], ["verify", store], ["inspect", store]):
        ended = subprocess.run([*PROGRAM, *command], capture_output=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, b"")
        assert rb"st\udcff.store" in ended.stdout


def test_a_trace_that_is_a_pipe_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")  # which nobody ever writes to
    for path in (tmp_path / "pipe", "/dev/zero"):
        result = run("trace", path)
        assert result.exit_code == 2
        assert "no regular file" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("command", [["--help"], ["pack", "--help"], ["--version"], ["inspect"]])
def test_output_that_cannot_be_written_is_one_line_and_2(array: Path, command: list[str]):
    arguments = [*command, array] if command == ["inspect"] else command
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run([*PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, check=False)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert b"No space left" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(
    "command", [["inspect", "missing"], ["no-such-command"], ["inspect", "--no-such-option"]]
)
def test_an_error_that_cannot_be_written_keeps_its_status(command: list[str]):
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run([*PROGRAM, *command], stdout=full, stderr=full, check=False)
    assert ended.returncode == 2
