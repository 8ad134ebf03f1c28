"""A catalogue of hostile checkpoints: each row changes an intact one, and seals it again with right checksums."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import socket
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MANIFEST, VALUES, INDEX, TENSORS, STATEFUL = (
    "manifest.json",
    "values.pt",
    ".metadata",
    "__0_0.distcp",
    "stateful-0-0.pt",
)
HOSTILE: dict[str, Callable[[Path, Path], object]] = {}
"""By name: `change(folder, canary)` makes the checkpoint in `folder` hostile; what it tries to run makes `canary`."""


def hostile(change: Callable[[Path, Path], object]) -> Callable[[Path, Path], object]:
    """Add a row."""
    HOSTILE[change.__name__] = change
    return change


# -- what runs when it is unpickled --------------------------------------------------------------------------


@dataclass
class Gadget:
    """Makes `canary` when it is unpickled."""

    canary: Path
    call: Callable[..., Any] = os.system

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return self.call, (f"touch {self.canary}" if self.call is os.system else f"open({str(self.canary)!r}, 'w')",)


def by_name(module: str, name: str, argument: str, protocol: int) -> bytes:
    """A pickle that calls a function by its name, which this process need not be able to pickle."""
    given = pickle.dumps(argument, 0)[:-1]
    if protocol < 4:
        return f"c{module}\n{name}\n".encode() + b"(" + given + b"tR."
    texts = b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name))
    return b"\x80\x04" + texts + b"\x93" + b"(" + given + b"tR."


def as_archive(data: bytes) -> bytes:
    """`data` as the pickle of a file of torch.save."""
    buffer, good = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.zeros(3)}, good)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as made:
        for part in source.infolist():
            made.writestr(part.filename, data if part.filename.endswith("data.pkl") else source.read(part))
    return buffer.getvalue()


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


# -- the folder ----------------------------------------------------------------------------------------------


def seal(folder: Path, change: Callable[[dict[str, Any]], object] = lambda fields: None) -> None:
    """Write the manifest again, with sizes and checksums of the files as they are now, changed by `change`."""
    fields = json.loads((folder / MANIFEST).read_text())
    del fields["checksum"]
    for name in fields["files"]:
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
            fields["files"][name] = [len(data), zlib.crc32(data)]
    change(fields)
    text = json.dumps({**fields, "checksum": zlib.crc32(json.dumps(fields, sort_keys=True).encode())})
    (folder / MANIFEST).write_text(text)


def put(folder: Path, name: str, data: bytes) -> None:
    (folder / name).write_bytes(data)
    seal(folder)


def content_of(folder: Path) -> dict[str, Any]:
    return torch.load(folder / VALUES, weights_only=True)


def with_content(folder: Path, **parts: Any) -> None:
    put(folder, VALUES, saved({**content_of(folder), **parts}))


# -- code in pickles -----------------------------------------------------------------------------------------


@hostile
def index_calls_os_system(folder: Path, canary: Path) -> None:
    put(folder, INDEX, pickle.dumps(Gadget(canary)))


@hostile
def index_calls_exec(folder: Path, canary: Path) -> None:
    put(folder, INDEX, pickle.dumps(Gadget(canary, exec)))


@hostile
def index_calls_eval_by_name_in_protocol_0(folder: Path, canary: Path) -> None:
    put(folder, INDEX, by_name("builtins", "eval", f"open({str(canary)!r}, 'w')", 0))


@hostile
def index_calls_what_torch_has_imported(folder: Path, canary: Path) -> None:
    put(folder, INDEX, by_name("torch.serialization", "os.system", f"touch {canary}", 4))


@hostile
def index_has_a_gadget_in_a_field(folder: Path, canary: Path) -> None:
    found = pickle.loads((folder / INDEX).read_bytes())
    found.planner_data = Gadget(canary)
    put(folder, INDEX, pickle.dumps(found))


@hostile
def index_has_a_gadget_as_a_key(folder: Path, canary: Path) -> None:
    found = pickle.loads((folder / INDEX).read_bytes())
    put(folder, INDEX, pickle.dumps([Gadget(canary), found]))


@hostile
def values_are_a_pickle(folder: Path, canary: Path) -> None:
    put(folder, VALUES, pickle.dumps(Gadget(canary)))


@hostile
def values_are_an_old_file_of_torch_save(folder: Path, canary: Path) -> None:
    buffer = io.BytesIO()
    torch.save(Gadget(canary), buffer, _use_new_zipfile_serialization=False)
    put(folder, VALUES, buffer.getvalue())


@hostile
def values_have_a_gadget_in_an_archive(folder: Path, canary: Path) -> None:
    put(folder, VALUES, as_archive(pickle.dumps(Gadget(canary), 2)))


@hostile
def values_have_a_gadget_as_extra(folder: Path, canary: Path) -> None:
    put(folder, VALUES, saved({**content_of(folder), "extra": {"epoch": Gadget(canary, exec)}}))


@hostile
def values_call_a_loader_of_torch(folder: Path, canary: Path) -> None:
    bomb = folder / "bomb"
    bomb.write_bytes(pickle.dumps(Gadget(canary)))
    put(folder, VALUES, as_archive(by_name("torch", "load", str(bomb), 0)))


@hostile
def values_are_a_script_module(folder: Path, canary: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name in ("data.pkl", "constants.pkl"):
            made.writestr(f"archive/{name}", pickle.dumps(Gadget(canary), 2))
        made.writestr("archive/version", "3\n")
        made.writestr("archive/code/__torch__.py", f"import os\nos.system('touch {canary}')\n")
    put(folder, VALUES, buffer.getvalue())


@hostile
def a_stateful_object_is_a_gadget(folder: Path, canary: Path) -> None:
    put(folder, STATEFUL, as_archive(pickle.dumps(Gadget(canary), 2)))


def chunk_of(folder: Path, name: str, data: bytes) -> None:
    """Put `data` in place of the archive that holds a tensor."""
    start = (folder / TENSORS).stat().st_size
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes() + data)

    def change(fields: dict[str, Any]) -> None:
        offsets, sizes, file, *_ = fields["chunks"][name][0]
        fields["chunks"][name] = [[offsets, sizes, file, start, len(data)]]

    seal(folder, change)


@hostile
def a_tensor_is_a_gadget(folder: Path, canary: Path) -> None:
    chunk_of(folder, "0.weight", as_archive(pickle.dumps(Gadget(canary), 2)).ljust(200))


@hostile
def a_tensor_is_a_plain_pickle(folder: Path, canary: Path) -> None:
    chunk_of(folder, "0.weight", pickle.dumps(Gadget(canary)) + bytes(200))


# -- values of other kinds -----------------------------------------------------------------------------------


@hostile
def values_are_packed(folder: Path, canary: Path) -> None:
    put(folder, VALUES, packed(saved({**content_of(folder), "extra": {"a": torch.zeros(1)}}), 64 << 20))


@hostile
def values_declare_a_tebibyte(folder: Path, canary: Path) -> None:
    value = saved({"a": torch.zeros(7, dtype=torch.uint8)})
    put(folder, VALUES, value.replace(b"K\x07t", b"\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"t"))


def packed(data: bytes, size_bytes: int) -> bytes:
    """The archive `data` in compressed form, with a record of so many bytes more."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as made:
        for part in source.infolist():
            more = bytes(size_bytes) if part.filename.endswith("data/0") else b""
            made.writestr(part.filename, source.read(part) + more)
    return buffer.getvalue()


@hostile
def a_tensor_is_packed(folder: Path, canary: Path) -> None:
    chunk_of(folder, "0.weight", packed(saved(torch.zeros(7, 4)), 64 << 20))


@hostile
def a_tensor_has_no_values(folder: Path, canary: Path) -> None:
    chunk_of(folder, "0.weight", saved(torch.empty(7, 4, device="meta")))


@hostile
def a_tensor_is_sparse(folder: Path, canary: Path) -> None:
    chunk_of(folder, "0.weight", saved(torch.eye(7)[:, :4].to_sparse()))


@hostile
def a_tensor_is_a_list(folder: Path, canary: Path) -> None:
    chunk_of(folder, "0.weight", saved([torch.zeros(7, 4)]))


@hostile
def values_are_no_dict(folder: Path, canary: Path) -> None:
    put(folder, VALUES, saved([1, 2]))


@hostile
def values_lack_a_part(folder: Path, canary: Path) -> None:
    put(folder, VALUES, saved({"extra": {}}))


@hostile
def values_replace_the_parameters_of_a_group(folder: Path, canary: Path) -> None:
    options = {
        label: [{**group, "params": []} for group in groups] for label, groups in content_of(folder)["options"].items()
    }
    with_content(folder, options=options)


@hostile
def values_have_another_number_of_groups(folder: Path, canary: Path) -> None:
    with_content(folder, options={label: [] for label in content_of(folder)["options"]})


@hostile
def values_have_options_that_are_no_dicts(folder: Path, canary: Path) -> None:
    with_content(folder, options={label: [5] for label in content_of(folder)["options"]})


@hostile
def values_are_of_a_parameter_that_is_not_there(folder: Path, canary: Path) -> None:
    with_content(folder, values={label: {"": {}, "nobody": {"step": 3}} for label in content_of(folder)["options"]})


@hostile
def extra_is_no_dict(folder: Path, canary: Path) -> None:
    with_content(folder, extra=[1])


@hostile
def random_state_is_nested(folder: Path, canary: Path) -> None:
    """The state of Python's generator is JSON in a tensor of bytes."""
    replace_tensor(folder, "rank0/random/python", lambda text: b"[" * len(text))


@hostile
def random_state_is_of_another_kind(folder: Path, canary: Path) -> None:
    replace_tensor(folder, "rank0/random/numpy", lambda text: b'["evil"]'.ljust(len(text)))


@hostile
def random_state_of_torch_is_noise(folder: Path, canary: Path) -> None:
    replace_tensor(folder, "rank0/random/torch", lambda text: random.Random(0).randbytes(len(text)))


def replace_tensor(folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a tensor where they stand in the file of tensors."""
    from torch.distributed import checkpoint as dcp

    shape = json.loads((folder / MANIFEST).read_text())["tensors"][name]["shape"]
    held = torch.empty(shape, dtype=torch.uint8)
    dcp.load({name: held}, checkpoint_id=folder, no_dist=True)
    before, data = held.numpy().tobytes(), (folder / TENSORS).read_bytes()
    assert data.count(before) == 1
    start = data.index(before)
    after = data[:start] + change(before) + data[start + len(before) :]
    assert len(after) == len(data)
    put(folder, TENSORS, after)


# -- paths and kinds of files --------------------------------------------------------------------------------


def name_file(folder: Path, name: str) -> None:
    seal(folder, lambda fields: fields["files"].update({name: [6, zlib.crc32(b"secret")]}))


@hostile
def a_file_is_outside(folder: Path, canary: Path) -> None:
    (folder.parent.parent / "secret").write_bytes(b"secret")
    name_file(folder, "../../secret")


@hostile
def a_file_has_an_absolute_path(folder: Path, canary: Path) -> None:
    (folder.parent / "secret").write_bytes(b"secret")
    name_file(folder, str(folder.parent / "secret"))


@hostile
def a_file_has_a_null_in_its_name(folder: Path, canary: Path) -> None:
    name_file(folder, "a\0b")


def outside(folder: Path, name: str, data: bytes | None = None) -> None:
    """Move a file out of the folder, and leave a link to it."""
    away = folder.parent.parent / f"away-{name}"
    shutil.move(folder / name, away)
    if data is not None:
        away.write_bytes(data)
    (folder / name).symlink_to(away)


@hostile
def values_are_a_link_to_a_gadget_outside(folder: Path, canary: Path) -> None:
    outside(folder, VALUES, pickle.dumps(Gadget(canary)))
    seal(folder)


@hostile
def tensors_are_a_link_outside(folder: Path, canary: Path) -> None:
    outside(folder, TENSORS)


@hostile
def values_are_a_link_to_themselves(folder: Path, canary: Path) -> None:
    (folder / VALUES).unlink()
    (folder / VALUES).symlink_to(VALUES)


def replaced(folder: Path, name: str, make: Callable[[Path], object]) -> None:
    (folder / name).unlink()
    make(folder / name)


@hostile
def manifest_is_a_fifo(folder: Path, canary: Path) -> None:
    replaced(folder, MANIFEST, os.mkfifo)


@hostile
def values_are_a_fifo(folder: Path, canary: Path) -> None:
    replaced(folder, VALUES, os.mkfifo)


@hostile
def tensors_are_a_fifo(folder: Path, canary: Path) -> None:
    replaced(folder, TENSORS, os.mkfifo)


@hostile
def latest_is_a_fifo(folder: Path, canary: Path) -> None:
    replaced(folder.parent, "latest", os.mkfifo)
    seal(folder, lambda fields: fields.update(number="evil"))


@hostile
def latest_leads_away(folder: Path, canary: Path) -> None:
    other = folder.parent.parent / "step-00000009"
    shutil.copytree(folder, other)
    put(other, VALUES, pickle.dumps(Gadget(canary)))
    (folder.parent / "latest").write_text("../step-00000009\n")
    shutil.rmtree(folder)


@hostile
def latest_has_no_end(folder: Path, canary: Path) -> None:
    (folder.parent / "latest").unlink()
    (folder.parent / "latest").symlink_to("/dev/zero")
    seal(folder, lambda fields: fields.update(number="evil"))


@hostile
def manifest_has_no_end(folder: Path, canary: Path) -> None:
    replaced(folder, MANIFEST, lambda path: path.symlink_to("/dev/zero"))


@hostile
def values_have_no_end(folder: Path, canary: Path) -> None:
    replaced(folder, VALUES, lambda path: path.symlink_to("/dev/zero"))


@hostile
def manifest_is_a_folder(folder: Path, canary: Path) -> None:
    replaced(folder, MANIFEST, Path.mkdir)


@hostile
def values_are_a_socket(folder: Path, canary: Path) -> None:
    def bind(path: Path) -> None:
        before = Path.cwd()
        os.chdir(path.parent)  # the path of a socket is at most 108 bytes long
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(before)

    replaced(folder, VALUES, bind)


@hostile
def checkpoint_is_a_link_to_itself(folder: Path, canary: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(folder)


# -- the manifest --------------------------------------------------------------------------------------------


@hostile
def manifest_is_a_pickle(folder: Path, canary: Path) -> None:
    (folder / MANIFEST).write_bytes(pickle.dumps(Gadget(canary)))


@hostile
def manifest_is_deep(folder: Path, canary: Path) -> None:
    (folder / MANIFEST).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)


@hostile
def manifest_is_deep_in_a_field(folder: Path, canary: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"mesh": ', '"mesh": ' + "[" * 50_000 + "]" * 50_000 + ', "mesh": ', 1))


@hostile
def manifest_is_enormous(folder: Path, canary: Path) -> None:
    os.truncate(folder / MANIFEST, 1 << 40)


@hostile
def manifest_has_a_long_number(folder: Path, canary: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"number": ', '"number": ' + "9" * 5000, 1))


@hostile
def manifest_has_a_name_twice(folder: Path, canary: Path) -> None:
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"files": {', f'"files": {{"{VALUES}": [1, 1], ', 1))


def tensor_field(folder: Path, field: str, value: object) -> None:
    """A field of the first tensor of the manifest."""
    seal(folder, lambda fields: next(iter(fields["tensors"].values())).update({field: value}))


HUGE: list[tuple[str, object]] = [
    ("shape", [10**18]), ("shape", [2**62, 2**62]), ("shape", [2**40]), ("shape", [-1, -28]), ("shape", [4.5]),
    ("shape", [float("nan")]), ("shape", "77"), ("shape", [[7, 4]]), ("shape", [1] * 100_000), ("dtype", "load"),
    ("dtype", "__class__"), ("dtype", 7), ("role", "class"), ("owner", {"a": 1}),
]  # fmt: skip
VARIANTS: set[str] = set()
"""Rows beside those that show each kind of fault once."""
for number, (key, given) in enumerate(HUGE):

    def change(folder: Path, canary: Path, key: str = key, given: object = given) -> None:
        tensor_field(folder, key, given)

    HOSTILE[row := f"a_tensor_has_{key}_{number}"] = change
    VARIANTS |= {row} if number in (1, 2, 5, 6, 7, 8, 10, 11) else set()


PLACES: list[tuple[str, list[object]]] = [
    ("offsets", [[1, 0], [7, 4], TENSORS, 0, 2000]), ("sizes", [[0, 0], [7, -4], TENSORS, 0, 2000]),
    ("file", [[0, 0], [7, 4], "../../secret", 0, 2000]), ("start", [[0, 0], [7, 4], TENSORS, -5, 2000]),
    ("end", [[0, 0], [7, 4], TENSORS, 10**15, 2000]), ("length", [[0, 0], [7, 4], TENSORS, 0, 10**15]),
    ("rank", [[0], [28], TENSORS, 0, 2000]), ("name", [[0, 0], [7, 4], VALUES, 0, 400]), ("nothing", []),
]  # fmt: skip
for number, (key, given) in enumerate(PLACES):

    def change_place(folder: Path, canary: Path, given: object = given) -> None:
        seal(folder, lambda fields: fields["chunks"].update({"0.weight": [given]}))

    HOSTILE[row := f"place_of_a_tensor_has_another_{key}"] = change_place
    VARIANTS |= {row} if number % 3 else set()

FIELDS: list[tuple[str, object]] = [
    ("files", {VALUES: [-1, 0]}), ("files", {VALUES: [float("nan"), 0]}), ("files", {VALUES: [10**18, 0]}),
    ("files", {}), ("files", [VALUES]), ("files", {".": [0, 0]}), ("files", {"": [0, 0]}), ("tensors", {}),
    ("tensors", {"": None}), ("optimizers", {"__class__": {"kind": "os.system", "groups": [["x"]]}}),
    ("world_size", 10**18), ("world_size", -1), ("number", float("inf")), ("calls", "1; import os"), ("calls", None),
    ("saved_at", float("nan")), ("mesh", {"__reduce__": "os.system"}), ("version", 10**400), ("version", [1]),
]  # fmt: skip
for number, (key, given) in enumerate(FIELDS):

    def change_field(folder: Path, canary: Path, key: str = key, given: object = given) -> None:
        seal(folder, lambda fields: fields.update({key: given}))

    HOSTILE[row := f"{key}_{number}_is_wrong"] = change_field
    VARIANTS |= {row} if number % 3 else set()
