"""Files made by a stranger: nothing in them runs, nothing hangs, and what is wrong is one of wholestep's own errors.

Each attempt runs in a process of its own, with bounded memory and time.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import json
import multiprocessing
import pickle
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import wholestep as ws
from tests.hostile import HOSTILE, VARIANTS, Gadget, as_archive
from tests.steps import mean_square as train_step
from wholestep.cache import step_cache
from wholestep.cache.key import digest
from wholestep.cli import app
from wholestep.distributed.typed_messages import of_plain, plain
from wholestep.hardware.hardware_file import to_json
from wholestep.typed_json import MalformedError

SECONDS = 20.0
MORE_BYTES = 2 << 30  # of memory that an attempt may take beside what the process has
FOLDER = "step-00000002"


class Counter:
    """A stateful object."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"count": 3}


def trained(root: Path) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step = ws.compile(train_step)
    for _ in range(2):
        step(model, optimizer, torch.randn(6, 4))
        ws.save(root, step, extra={"calls": step.calls}, stateful={"counter": Counter()}, keep=1)
    return step, model, optimizer


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, nn.Module, torch.optim.Optimizer, Path]:
    root = tmp_path_factory.mktemp("intact") / "runs"
    held = trained(root)
    ws.load(root, held[0])
    assert commands(root / FOLDER) == "said"  # what is imported is imported before the forks
    return *held, root


def state_of(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), step.calls, torch.get_rng_state()], buffer)
    return buffer.getvalue()


def attempts(*works: Callable[[], str]) -> list[str]:
    """What each of `works` returns, in turn in a forked process; the last text says how that ended, if it did not."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, used + MORE_BYTES))
        for work in works:
            try:
                said = work()
            except BaseException as error:
                said = f"raw {type(error).__name__}: {error}"
            theirs.send(said[:1000])

    process = context.Process(target=run, daemon=True)
    process.start()
    theirs.close()
    said: list[str] = []
    try:
        while len(said) < len(works) and ours.poll(SECONDS):
            said.append(ours.recv())
        return said if len(said) == len(works) else [*said, f"raw: nothing after {SECONDS} s"]
    except EOFError:
        process.join()
        return [*said, f"raw: ended with {process.exitcode}"]
    finally:
        process.kill()
        process.join()


def outcome(call: Callable[[], object]) -> str:
    """Whether it loaded, else what an error of wholestep's own has found."""
    try:
        call()
    except ws.WholestepError as error:
        return f"refused: {error.found}"
    return "loaded"


HARMLESS = {
    *(name for name in HOSTILE if name.startswith("index_")),  # wholestep never reads the index
    "manifest_has_a_name_twice",  # the last one counts, as it did for the checksum
    "world_size_10_is_wrong",  # random state of another number of ranks stays unread
}


def row(name: str) -> Any:
    """Variants run in `make test-full`."""
    full = [pytest.mark.full] if name in VARIANTS else []
    return pytest.param(name, marks=full)


@pytest.mark.parametrize("name", [row(name) for name in HOSTILE])
def test_hostile_checkpoint(name: str, intact: Any, tmp_path: Path) -> None:
    step, model, optimizer, root = intact
    canary = tmp_path / "canary"
    shutil.copytree(root, tmp_path / "runs", symlinks=True)
    folder = tmp_path / "runs" / FOLDER
    HOSTILE[name](folder, canary)
    before = state_of(step, model, optimizer)

    def into_a_step() -> str:
        said = outcome(lambda: ws.load(folder.parent, step, stateful={"counter": Counter()}))
        changed = state_of(step, model, optimizer) != before
        return f"{said}, and the state has changed" if changed and said != "loaded" else said

    def into_nothing() -> str:
        return outcome(lambda: ws.load(folder))

    def exported() -> str:
        return outcome(lambda: ws.export(tmp_path / "exported", folder))

    said = attempts(into_a_step, into_nothing, exported, lambda: commands(folder))
    assert not canary.exists(), said
    wrong = [text for text in said if text.startswith("raw") or "has changed" in text]
    assert not wrong
    assert said[0].startswith("loaded" if name in HARMLESS else "refused: ")


def commands(folder: Path) -> str:
    """Show and verify."""
    for args in ([folder.parent], [folder, "--verify"]):
        with contextlib.redirect_stderr(io.StringIO()):
            done = CliRunner().invoke(app, ["checkpoint", *map(str, args)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            return f"raw {args[1:]}: {done.exception!r}"
        if "\x1b" in done.output:
            return "raw escape"
    return "said"


def test_gadgets_do_run_where_they_are_unpickled(tmp_path: Path) -> None:
    """The canary is a good one."""
    for number, call in enumerate((None, exec)):
        canary = tmp_path / str(number)
        pickle.loads(pickle.dumps(Gadget(canary, call) if call else Gadget(canary)))
        assert canary.exists()


# -- other files ---------------------------------------------------------------------------------------------

LOADERS: dict[str, Callable[[Path], object]] = {
    "plan": ws.Plan.load,
    "hardware": ws.Hardware.load,
    "cache": lambda path: cached(path),
}


def cached(path: Path) -> object:
    """What a step does with an entry of the compile cache."""
    key = step_cache.Key.of({"graph": "x"})
    shutil.copy(path, step_cache.path_of(path.parent, key))
    event, choices, warning = step_cache.StepCache(path.parent, lambda *_: None).find(key)
    if warning:
        raise ws.CacheError(warning)
    try:
        return event, {name: of_plain(ws.Hardware, value, name) for name, (_, value) in choices.items()}
    except MalformedError as error:
        raise ws.CacheError(str(error)) from error


def good(kind: str) -> str:
    """A file that is read."""
    if kind == "hardware":
        return json.dumps(to_json(ws.Hardware.preset("dgx-h100")))
    if kind == "cache":
        body = {
            "key": dict(step_cache.Key.of({"graph": "x"}).parts),
            "choices": {"hardware": ["", plain(ws.Hardware.preset("loopback"))]},
        }
        return json.dumps({"format": step_cache.FORMAT, "version": step_cache.VERSION, "sum": sum_of(body), **body})
    model = nn.Linear(4, 4)
    graph = ws.capture(train_step, model, torch.optim.AdamW(model.parameters()), torch.randn(8, 4))
    return ws.plan(graph, "dp=2", ws.DataParallel("fully_shard")).to_json()


def sum_of(body: Any) -> str:
    return digest([json.dumps(body, sort_keys=True)])


def sealed(kind: str, content: Any) -> bytes:
    """A cache entry has a checksum."""
    if kind == "cache" and isinstance(content, dict):
        content["sum"] = sum_of({"key": content.get("key"), "choices": content.get("choices")})
    return json.dumps(content).encode()


def code(canary: Path) -> list[Any]:
    """Values that name code."""
    call = f"open({str(canary)!r}, 'w')"
    return [
        {"is": "os.system", "command": f"touch {canary}"}, {"is": "__import__", "name": "os"}, {"is": "eval"},
        {"is": "DataParallel", "style": f"lambda *a: {call}"}, {"is": "DataParallel", "__class__": "os.system"},
        {"dtype": "load"}, {"dtype": "hub"}, {"dtype": "_C"}, {"map": [[{"is": "eval"}, call]]},
        {"__reduce__": ["os.system", f"touch {canary}"]}, {"py/object": "os.system", "py/reduce": [call]},
        f"!!python/object/apply:os.system ['touch {canary}']", f"__import__('os').system('touch {canary}')", call,
        f"{{{{ cycler.__init__.__globals__.os.popen('touch {canary}') }}}}", {"strategies": [{"is": "Plan"}]},
    ]  # fmt: skip


def positions(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Places in a JSON value, some of each list."""
    yield at
    inner = value.items() if isinstance(value, dict) else list(enumerate(value))[:2] if isinstance(value, list) else ()
    for key, one in inner:
        yield from positions(one, (*at, key))


def put_at(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    made = copy.copy(value)
    made[at[0]] = put_at(value[at[0]], at[1:], new)
    return made


@pytest.mark.parametrize("kind", LOADERS)
def test_no_value_of_a_file_is_run(kind: str, tmp_path: Path) -> None:
    """Every value of the file in turn names code."""
    path, canary, text = tmp_path / "x.json", tmp_path / "canary", good(kind)
    path.write_text(text)
    LOADERS[kind](path)
    content, refused, before = json.loads(text), 0, set(sys.modules)
    places = list(positions(content))
    for number, at in enumerate(places):
        several = code(canary)
        for value in several if len(places) < 50 else several[number % len(several) :: 8]:
            path.write_bytes(sealed(kind, put_at(content, at, value)))
            with contextlib.suppress(ws.WholestepError):
                LOADERS[kind](path)
                refused -= 1
            refused += 1
    assert not canary.exists()
    assert refused > len(places)
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert not new - {"torch", "wholestep"}, "a file names no module to import"


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_is_no_file_of_ours(kind: str, protocol: int, tmp_path: Path) -> None:
    path, canary = tmp_path / "x.json", tmp_path / "canary"
    for data in (pickle.dumps(Gadget(canary), protocol), as_archive(pickle.dumps(Gadget(canary), 2))):
        path.write_bytes(data)
        with pytest.raises(ws.WholestepError):
            LOADERS[kind](path)
    assert not canary.exists()


def test_a_configuration_with_code_of_its_own(tmp_path: Path) -> None:
    """`auto_map` names code beside a configuration; transformers runs it for who trusts it."""
    pytest.importorskip("transformers")
    canary = tmp_path / "canary"
    (tmp_path / "evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    for kind in ("gpt2", "vit", "evil"):
        config = {"model_type": kind, "auto_map": names, "_name_or_path": str(tmp_path), "n_layer": 1, "n_embd": 8}
        config |= {"n_head": 2, "vocab_size": 32, "trust_remote_code": True}
        (tmp_path / "config.json").write_text(json.dumps(config))
        done = CliRunner().invoke(app, ["plan", "--hf", str(tmp_path), "--mesh", "dp=2"], input="y\ny\ny\n")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        assert not canary.exists()
        assert "[y/N]" not in done.output, "nobody is asked whether to run it"


# -- the source ----------------------------------------------------------------------------------------------

ALLOWED = {
    ("_torch/attributes.py", "exec"): "a function with a number of closure variables, for the code of another",
    ("runtime/guards.py", "exec"): "comparisons that wholestep writes; all values are names",
    ("capture/call_structure.py", "exec"): "what opens arguments that are built alike; all values are names",
    ("backend/eager.py", "exec"): "the text of a graph that was captured in this process",
    ("sizes.py", "exec"): "expressions of sizes that were captured in this process",
    ("sizes.py", "eval"): "the same",
    ("cli/target.py", "importlib.import_module"): "the user names this module",
    ("cli/hf.py", "importlib.import_module"): "transformers",
    ("_torch/symmetric_memory.py", "importlib.import_module"): "a module of torch, by a constant name",
}
DANGEROUS = {
    "eval", "exec", "__import__", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads",
    "shelve.open", "yaml.load", "yaml.unsafe_load", "importlib.import_module", "runpy.run_path", "os.system",
    "os.popen",
    "torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "np.load", "numpy.load",
    "subprocess.run", "subprocess.Popen", "subprocess.check_output",
    "dist.all_gather_object", "dist.gather_object", "dist.broadcast_object_list", "dist.scatter_object_list",
    "dist.send_object_list", "dist.recv_object_list",
}  # fmt: skip
SOURCE = Path(ws.__file__).parent


def calls(tree: ast.AST) -> Iterator[str]:
    """The names of functions that a module calls and that can run code from data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {one.arg: ast.unparse(one.value) for one in node.keywords}
            if name in DANGEROUS and not (name == "torch.load" and options.get("weights_only") == "True"):
                yield name
            if "FileSystemReader" in name or name.endswith("read_metadata"):
                yield name


def test_nothing_else_in_the_source_can_run_data() -> None:
    found = {
        (path.relative_to(SOURCE).as_posix(), name)
        for path in SOURCE.rglob("*.py")
        for name in calls(ast.parse(path.read_text()))
    }
    assert found == set(ALLOWED)


def test_a_dangerous_call_is_found() -> None:
    text = "torch.load(path)\ntorch.load(path, weights_only=False)\ntorch.load(path, weights_only=True)\neval(x)"
    assert list(calls(ast.parse(text))) == ["torch.load", "torch.load", "eval"]
