"""Files written whole or not at all, and only where a regular file may be."""

from __future__ import annotations

import os
import pathlib
import socket
import stat

import pytest

from dsv4_jax import output
from dsv4_jax.errors import FileError
from dsv4_jax.output import check_output, check_picture, open_output


def write(path, data: bytes = b"new") -> None:
    with open_output(path) as file:
        file.write(data)


def names(folder: pathlib.Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_new_and_old_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    umask = os.umask(0o027)
    try:
        write("x")
        assert pathlib.Path("x").read_bytes() == b"new" and stat.S_IMODE(os.stat("x").st_mode) == 0o640
    finally:
        os.umask(umask)
    os.chmod("x", 0o4604)
    write(tmp_path / "x", b"newer")
    assert stat.S_IMODE(os.stat("x").st_mode) == 0o604, "permissions stay, but never those of a privileged program"
    with open_output("text", encoding="utf-8") as file:
        file.write("é\n")
    assert (tmp_path / "text").read_bytes() == "é\n".encode()
    write("y" * 255)
    assert names(tmp_path) == ["text", "x", "y" * 255]


def test_readers_see_the_old_file_or_the_new_one(tmp_path):
    (path := tmp_path / "x").write_bytes(b"old")
    with path.open("rb") as reader, open_output(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
        assert len(names(tmp_path)) == 2
    with path.open("rb") as reader:
        assert reader.read() == b"new"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError, SystemExit, GeneratorExit])
def test_a_failure_leaves_what_was_there(tmp_path, error):
    (path := tmp_path / "x").write_bytes(b"old")
    for place in (path, tmp_path / "none"):
        with pytest.raises(error), open_output(place) as file:
            file.write(b"half")
            raise error("stop")
    assert names(tmp_path) == ["x"] and path.read_bytes() == b"old"


@pytest.mark.parametrize("call", ["write", "fsync", "replace", "fchmod"])
def test_a_failing_system_call_leaves_what_was_there(tmp_path, call, monkeypatch):
    (path := tmp_path / "x").write_bytes(b"old")

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    if call != "write":
        monkeypatch.setattr(output.os, call, fail)
    with pytest.raises(FileError, match=r"x: No space left on device$"), open_output(path):
        if call == "write":
            fail()
    monkeypatch.undo()
    assert names(tmp_path) == ["x"] and path.read_bytes() == b"old"


def places(folder: pathlib.Path) -> dict[str, str]:
    """Path -> what is said of it. All of them exist, but for the last ones."""
    (folder / "directory").mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "file").touch()
    (folder / "link").symlink_to("file")
    (folder / "dangling").symlink_to("nothing")
    (folder / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket"))
    return {
        "directory": "is a directory, not a regular file",
        "fifo": "is a FIFO",
        "socket": "is a socket",
        "link": "is a symbolic link: name the file itself",
        "dangling": "is a symbolic link",
        "loop": "is a symbolic link",
        "/dev/null": "is a device",
        "": "an empty name",
        ".": "is a directory",
        "..": "is a directory",
        "directory/": "is a directory",
        "file/x": "there is no folder .*file",
        "none/x": "there is no folder .*none",
        "loop/x": "symbolic links",
        "x" * 256: "File name too long",
        "a\0b": "holds no NUL",
    }


def test_refusals(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = places(tmp_path)
    before = {name: os.lstat(name).st_ino for name in names(tmp_path)}
    for place, problem in refused.items():
        with pytest.raises(FileError, match=problem):
            check_output(place)
        with pytest.raises(FileError, match=problem):
            write(place)
    assert {name: os.lstat(name).st_ino for name in names(tmp_path)} == before
    assert (tmp_path / "file").read_bytes() == b""


def test_folders_may_be_links(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    write(tmp_path / "link" / "x")
    assert (tmp_path / "folder" / "x").read_bytes() == b"new"


def test_a_place_that_changes_meanwhile(tmp_path):
    """Between check and rename: a link is replaced or refused, never followed; the folder stays the one opened."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    with pytest.raises(FileError, match="symbolic link"), open_output(tmp_path / "x") as file:
        file.write(b"new")
        (tmp_path / "x").symlink_to(victim)
    assert victim.read_bytes() == b"mine" and names(tmp_path) == ["victim", "x"]
    (folder := tmp_path / "folder").mkdir()
    with open_output(folder / "y") as file:
        file.write(b"new")
        folder.rename(tmp_path / "moved")
        folder.mkdir()
    assert names(tmp_path / "moved") == ["y"] and names(folder) == []


def test_temporary_names_cannot_be_guessed(tmp_path, monkeypatch):
    seen = set()
    for _ in range(3):
        with open_output(tmp_path / "x"):
            seen |= set(names(tmp_path)) - {"x"}
    assert len(seen) == 3
    (tmp_path / "victim").write_bytes(b"mine")
    monkeypatch.setattr(output.secrets, "token_hex", lambda _: "guess")
    (tmp_path / ".guess.part").symlink_to(tmp_path / "victim")
    with pytest.raises(FileError, match="File exists"):
        write(tmp_path / "x")
    assert (tmp_path / "victim").read_bytes() == b"mine" and (tmp_path / ".guess.part").is_symlink()


def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path, monkeypatch):
    (path := tmp_path / "x").write_bytes(b"old")
    monkeypatch.setattr(output.os, "access", lambda *args, **kwargs: False)  # as root, everything may be written
    with pytest.raises(FileError, match="may not be written"):
        write(path)
    assert path.read_bytes() == b"old"


def test_a_file_of_someone_else_in_a_shared_folder_is_refused_before_the_work(tmp_path, monkeypatch):
    """Whoever may write in such a folder may not rename over what is another's."""
    (tmp_path / "x").touch()
    tmp_path.chmod(0o1777)
    check_output(tmp_path / "x")
    monkeypatch.setattr(output.os, "geteuid", lambda: os.getuid() + 12345)
    with pytest.raises(FileError, match="belongs to someone else"):
        check_output(tmp_path / "x")
    check_output(tmp_path / "new")


def test_pictures(tmp_path):
    for good in ("x.png", "x.PDF", "x.svg"):
        check_picture(tmp_path / good)
    for bad in ("x", "x.xyz", ".png", "x.png.gz", "png"):
        with pytest.raises(FileError, match=r"ends in \.png, \.pdf or \.svg"):
            check_picture(tmp_path / bad)
    assert names(tmp_path) == []
