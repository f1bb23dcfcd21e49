"""Every mistake gets one clear sentence and a non-zero exit, and leaves nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import hgc
from hgc.backends import parity
from hgc.cluster import Cluster
from hgc.errors import HgcError
from hgc.plan import Plan
from hgc.strategy import Strategy
from hgc.tools.cli import main
from tests import small_models
from tests.layered import layered_program

HERE = "tests.small_models"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


@dataclass(frozen=True)
class Mistake:
    """A command with the mistake in it, files it reads, and what the sentence must say."""

    command: str
    says: str
    files: tuple[tuple[str, Any], ...] = ()


def _files(**contents: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((name.replace("__", "."), content) for name, content in contents.items())


def _llama(**changes: Any) -> tuple[tuple[str, Any], ...]:
    return _files(config__json={name: value for name, value in (LLAMA | changes).items() if value is not None})


def _plan(content: Any) -> tuple[tuple[str, Any], ...]:
    return _files(plan__json=content)


def _strategy(**values: Any) -> tuple[tuple[str, Any], ...]:
    return _plan({"version": 1, "decisions": {"strategy": values}})


WORKS = f"compile {HERE}:works -o out"
CONFIG = "compile hf:config.json --devices 4 -o out"

REQUEST = [
    Mistake("", "arguments are required: COMMAND"),
    Mistake("compil x", "'compil' is not a command of hgc; did you mean 'compile'?"),
    Mistake(f"{WORKS} --device 4", "hgc compile has no option --device; did you mean '--devices'?"),
    Mistake(f"compile {HERE}:works --devices 4", "arguments are required: -o/--output"),
    Mistake(WORKS, "one of the arguments --devices --cluster is required"),
    Mistake(f"{WORKS} --devices 0", "'0' is not a whole number of 1 or more"),
    Mistake(f"{WORKS} --devices four", "'four' is not a whole number of 1 or more"),
    Mistake(f"{WORKS} --devices 4 --cluster c.json", "not allowed with argument --devices"),
    Mistake(f"{WORKS} --devices 4 more", "hgc compile takes no argument 'more'"),
    Mistake(f"{CONFIG} --batch-size -3", "argument --batch-size", _llama()),
    Mistake("bench speed", "there is no benchmark 'speed'"),
]

MODEL = [
    Mistake("compile llama --devices 4 -o out", "'llama' names no model; write hf:path/to/config.json or module:function"),
    Mistake("compile hf: --devices 4 -o out", "'hf:' names no model"),
    Mistake(CONFIG, "model config 'config.json' does not exist; check the path"),
    Mistake("compile hf:meta-llama/Llama-2 --devices 4 -o out", "is no file here, and hgc downloads nothing"),
    Mistake(CONFIG, "hf:config.json is not valid JSON at line 1, column 2", _files(config__json="{,")),
    Mistake(CONFIG, "hf:config.json has no model_type", _llama(model_type=None)),
    Mistake(CONFIG, "has no model_type", _files(config__json=[])),
    Mistake(CONFIG, "has model_type 'lama', which this transformers does not know; did you mean 'llama", _llama(model_type="lama")),
    Mistake(CONFIG, "has architecture 'LlamaForPoetry', which this transformers does not know", _llama(architectures=["LlamaForPoetry"])),
    Mistake(CONFIG, "hgc has no example batch for LlamaModel; write a function", _llama(architectures=["LlamaModel"])),
    Mistake(CONFIG, "correct the config", _llama(num_attention_heads=5)),
    Mistake(CONFIG, "correct the config", _llama(hidden_size="wide")),
    Mistake(f"{CONFIG} --sequence-length 256", "--sequence-length is 256, the model's config allows 128 at most", _llama()),
    Mistake("compile nowhere:works --devices 4 -o out", "there is no module 'nowhere'"),
    Mistake(f"compile {HERE}:wroks --devices 4 -o out", "has no function 'wroks'; did you mean 'works'?"),
    Mistake(f"compile {HERE}:not_a_function --devices 4 -o out", "has no function 'not_a_function'"),
    Mistake("compile broken:f --devices 4 -o out", "broken.py line 1 is not Python", _files(broken__py="def f(:\n")),
    Mistake(
        "compile needy:f --devices 4 -o out",
        "imports 'not_installed_at_all', which is not",
        _files(needy__py="import not_installed_at_all\n"),
    ),
    Mistake(f"compile {HERE}:model_alone --devices 4 -o out", "returned Classifier; expected (model, example_inputs)"),
    Mistake(f"compile {HERE}:no_module --devices 4 -o out", "returned str as the model; expected (model, example_inputs)"),
    Mistake(f"compile {HERE}:list_of_inputs --devices 4 -o out", "returned list as the example inputs; expected"),
    Mistake(f"compile {HERE}:no_tensors --devices 4 -o out", "returned example inputs without a tensor"),
    Mistake(f"compile {HERE}:fails --devices 4 -o out", "ValueError: no such data set"),
]

TRACE = [
    Mistake(f"compile {HERE}:branches_on_data --devices 2 -o out", "small_models.py"),
    Mistake(f"compile {HERE}:reads_data --devices 2 -o out", "item"),
    Mistake(f"compile {HERE}:returns_no_loss --devices 2 -o out", "loss"),
    Mistake(f"compile {HERE}:returns_nothing --devices 2 -o out", "loss"),
    Mistake(f"compile {HERE}:wrong_input_name --devices 2 -o out", "pixels"),
    Mistake(f"compile {HERE}:wrong_shape --devices 2 -o out", "small_models.py"),
    Mistake(f"compile {HERE}:odd_input_name --devices 2 -o out", "'two words' is not a Python identifier; rename it"),
]

PLAN = [
    Mistake(
        f"{WORKS} --devices 4 --plan dp3", "the plan needs 3 devices (dp 3), the cluster has 4; the nearest strategy that fits is 'dp4'"
    ),
    Mistake(f"{WORKS} --devices 4 --plan ap4", "unknown word 'ap4' in strategy 'ap4'; did you mean"),
    Mistake(f"{WORKS} --devices 4 --plan dp", "has no size; write for example 'dp2'"),
    Mistake(f"{WORKS} --devices 4 --plan dp4,zero4", "zero is 4; expected 0, 1, 2 or 3, and the nearest is 3"),
    Mistake(f"{WORKS} --devices 4 --plan tp4,zero3", "zero is 3 but dp is 1"),
    Mistake(f"{WORKS} --devices 4 --plan dp-4", "dp is -4; expected a whole number of 1 or more"),
    Mistake(f"{WORKS} --devices 4 --plan plan.json", "plan file 'plan.json' does not exist; check the path"),
    Mistake(f"{WORKS} --devices 4 --plan plan.json", "plan.json: the plan is not valid JSON at line 1", _plan('{"version": 1,')),
    Mistake(f"{WORKS} --devices 4 --plan plan.json", "plan.json: unknown key 'dpp' in strategy; did you mean 'dp'?", _strategy(dpp=4)),
    Mistake(f"{WORKS} --devices 4 --plan plan.json", "plan.json: strategy.dp is '4'; expected a whole number", _strategy(dp="4")),
    Mistake(f"{WORKS} --devices 4 --plan plan.json", "version 99, this hgc reads version 1", _plan({"version": 99})),
    Mistake(
        f"{WORKS} --devices 4 --plan plan.json",
        "the plan was made for program ffffffffffff",
        _plan({"version": 1, "program_hash": "f" * 64, "decisions": {"strategy": {"dp": 4}}}),
    ),
    Mistake(f"compile {HERE}:odd_batch --devices 4 --plan dp4 -o out", "the batch"),
    Mistake(f"{CONFIG} --plan dp4 --batch-size 6", "the batch (b) is 6, which dp=4 does not divide", _llama()),
    Mistake(f"{CONFIG} --plan tp4 --sequence-length 6", "which tp=4 does not divide", _llama()),
]

CLUSTER = [
    Mistake(f"{WORKS} --cluster c.json", "cluster file 'c.json' does not exist"),
    Mistake(f"{WORKS} --cluster c.json", "c.json: the cluster is not valid JSON", _files(c__json="")),
    Mistake(
        f"{WORKS} --cluster c.json", "c.json: the cluster has no nodes; give at least one", _files(c__json={"version": 1, "nodes": []})
    ),
    Mistake(f"{WORKS} --cluster c.json", "c.json: nodes[0] lacks 'device', 'count', 'link'", _files(c__json={"version": 1, "nodes": [{}]})),
]

FOLDER = [
    Mistake("show out", "there is no folder 'out'; make it with hgc compile"),
    Mistake("verify out", "there is no folder 'out'; make it with hgc compile"),
    Mistake("verify there", "'there' is no compiled program: it has no program.py", _files(**{"there/note__txt": "x"})),
    Mistake(
        "verify there",
        "there/plan.json: the plan is not valid JSON",
        _files(**{"there/program__py": "", "there/plan__json": "{"}),
    ),
    Mistake(f"compile {HERE}:works --devices 4 -o file", "is a file; give a folder", _files(file="x")),
    Mistake(f"compile {HERE}:works --devices 4 -o there", "holds files that hgc did not write", _files(**{"there/note__txt": "x"})),
]


@pytest.mark.parametrize("mistake", REQUEST + MODEL + TRACE + PLAN + CLUSTER + FOLDER, ids=lambda m: f"{m.command[-40:]}: {m.says[:30]}")
def test_command(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in mistake.files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    before = sorted(tmp_path.rglob("*"))
    code = main(mistake.command.split())
    said = capsys.readouterr().err
    assert code == 2, said
    assert mistake.says in said
    assert said.startswith("hgc: ")
    assert said.count("\n") == 1, "one sentence"
    left = [path for path in sorted(tmp_path.rglob("*")) if path not in before and "__pycache__" not in path.parts]
    assert not left, "nothing half-written"


def _compile(**options: Any) -> None:
    model, inputs = small_models.works()
    hgc.compile(model, inputs, **options)


CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Cluster.local(0), "devices is 0; expected a whole number of 1 or more"),
    (lambda: Strategy(tp=0), "tp is 0; expected a whole number of 1 or more"),
    (lambda: Strategy(dp=2.5), "dp is 2.5; expected a whole number"),  # type: ignore[arg-type]
    (lambda: Plan("dp2"), "strategy is 'dp2'; expected a Strategy, for example Strategy(dp=2, tp=2)"),  # type: ignore[arg-type]
    (lambda: Plan.load("nowhere.json"), "plan file 'nowhere.json' does not exist"),
    (lambda: _compile(plan=7), "plan is int; expected"),
    (lambda: _compile(plan="dq2"), "unknown word 'dq2'"),
    (lambda: _compile(plan="dp2", cluster=Cluster.local(4)), "the plan needs 2 devices (dp 2), the cluster has 4"),
    (lambda: _compile(plan=lambda program, cluster: "dp2"), "the plan function returned str; expected a Plan"),
    (lambda: hgc.compile(torch.nn.Linear, {}), "expected a torch.nn.Module"),  # type: ignore[arg-type]
    (lambda: hgc.compile(small_models.Classifier(), [torch.zeros(1)]), "expected a dict of tensors"),  # type: ignore[arg-type]
    (lambda: hgc.default_pipeline().without("overlap"), "the pipeline has no pass 'overlap'; it has"),
    (lambda: hgc.backends.graphviz.draw(layered_program(["L"] * 2), open_body="M"), "the program has no block 'M' to open"),
    (lambda: hgc.backends.graphviz.draw(layered_program(["L"] * 2), "graph.bmp"), "ends in '.bmp'; expected one of .svg"),
]


@pytest.mark.parametrize(("call", "says"), CALLS, ids=[says[:40] for _, says in CALLS])
def test_python(call: Callable[[], Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HgcError) as caught:
        call()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_interrupted_save_leaves_the_old_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interruption comes when everything but the last file is written."""
    model, inputs = small_models.works()
    executable = hgc.compile(model, inputs, plan="dp2")
    executable.save(tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(parity, "pack", interrupted)
    for target in ("out", "new"):
        with pytest.raises(KeyboardInterrupt):
            executable.save(tmp_path / target)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_plan_of_another_model(tmp_path: Path) -> None:
    model, inputs = small_models.works()
    hgc.compile(model, inputs, plan="dp2").plan.save(tmp_path / "plan.json")
    other, inputs = small_models.wider()
    with pytest.raises(HgcError, match=r"the plan was made for program \w{12}, this program is \w{12}; make a new plan"):
        hgc.compile(other, inputs, plan=str(tmp_path / "plan.json"))
