"""What neuron_parallel_compile prints, and what the gate makes of it. The lines are of real logs."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.fake_neuron_tools import FAILURES
from trainwright.node.compile_gate import CompileGate
from trainwright.node.neuron_causes import CAUSES

GOOD = """\
2025-06-25 05:58:16.000194: 58408 INFO ||NEURON_PARALLEL_COMPILE||: Total graphs: 18
2025-06-25 05:58:16.000194: 58408 INFO ||NEURON_PARALLEL_COMPILE||: Total successful compilations: 18
2025-06-25 05:58:16.000194: 58408 INFO ||NEURON_PARALLEL_COMPILE||: Total failed compilations: 0
"""
FAILED = GOOD.replace("compilations: 0", "compilations: 2")
NONE = GOOD.replace("18", "0")
REPORT = """\
2025-01-17 01:16:07.000981:  32201  INFO ||NEURON_PARALLEL_COMPILE||: {
    "compilation_summary": {
        "true": 16,
        "false": 2
    },
    "compilation_report": {
        "/fsx/cache/neuronxcc-2.16.372.0+4a9b2326/MODULE_9993940051196728623+3cc9a3cb/model.hlo_module.pb": {
            "status": true,
            "retry": 0,
            "compile_time": 9.770226240158081
        },
        "/fsx/cache/neuronxcc-2.16.372.0+4a9b2326/MODULE_7470829644182149778+3cc9a3cb/model.hlo_module.pb": {
            "status": false,
            "retry": 1
        },
        "/fsx/cache/neuronxcc-2.16.372.0+4a9b2326/MODULE_5+3cc9a3cb/model.hlo_module.pb": {
            "status": false
        }
    }
}
"""
EXTRACTED = (
    "2024-06-18 04:54:58.000334:  72349  INFO ||NEURON_CC_WRAPPER||: Extracting graphs (/fsx/cache/neuronxcc-2.13.66."
    "0+6dfecc895/MODULE_1415285225680574447+6bd63055/model.hlo_module.pb) for ahead-of-time parallel compilation."
)
GRAPH = "neuronxcc-2.13.66.0+6dfecc895/MODULE_1415285225680574447+6bd63055"


def fed(*texts: str) -> CompileGate:
    gate = CompileGate("/fsx/cache")
    for text in texts:
        for line in text.splitlines():
            gate.feed(line, 0.0)
    return gate


def problem(*texts: str, exit_code: int = 0, done: Iterable[str] = ()) -> str | None:
    return fed(*texts).problem(exit_code, set(done).__contains__)


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        GOOD.replace("NEURON_PARALLEL_COMPILE", "PARALLEL_COMPILE"),  # older versions
        "\n".join(f"   INFO: {line}" for line in GOOD.splitlines()),  # below another launcher's prefix
        REPORT.replace("false", "true") + GOOD,
    ],
)
def test_a_good_log_passes(text: str) -> None:
    assert problem(text) is None


@pytest.mark.parametrize(
    "line",
    [
        "HYDRA_FULL_ERROR=1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=1 NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE=0",
        '    "ERROR": 0,',
        "{'level': 'ERROR'}",
        "logging.ERROR is 40, --log_level=ERROR, log level ERROR",
        "Epoch 0:  0%|  | 0/80 [00:00<?, ?it/s, reduced_train_loss=0.000, error=0.0]",
        "[NeMo W 2025-06-25 01:18:26 nemo_logging:349] errors are ignored here: Errors, ERRORS",
        "2025-Mar-20 16:41:45.094874 158738:163246 [5] socket.cc:44 CCOM WARN Timeout waiting for RX (waited 120 sec)",
        "[INFO]: Another process must be compiling MODULE_1+2, been waiting for: 1.0 minutes",
    ],
)
def test_a_line_that_only_looks_like_an_error_passes(line: str) -> None:
    assert problem(line, GOOD) is None


@pytest.mark.parametrize(
    "line",
    [
        "2024-12-20 02:37:08.000427: 448565 ERROR ||NEURON_CC_WRAPPER||: anything",
        "2025-Mar-27 17:23:42.108556 65653:71175 ERROR  NRT:nrt_init anything",
        "06/17/2021 10:00:54 AM ERROR [neuron-cc]: An Internal Compiler Error has occurred",
        "[ERROR]: anything",
        "SG-ERROR: File /opt/x.cpp:209, Assertion failed",
        "....................ERROR",
    ],
)
def test_one_line_with_an_error_fails_the_stage_whatever_the_totals_say(line: str) -> None:
    found = problem(line, GOOD)
    assert found is not None
    assert found.startswith("lines with ERROR: 1; first: ")
    assert line.split()[0].strip(".")[:10] in found


def test_the_first_failed_graph_is_named() -> None:
    found = problem(REPORT, FAILED)
    assert found == (
        "2 of 18 graphs failed to compile; first: "
        "/fsx/cache/neuronxcc-2.16.372.0+4a9b2326/MODULE_7470829644182149778+3cc9a3cb/model.hlo_module.pb"
    )


def test_a_report_with_prefixes_is_read_and_counts_more_than_the_totals() -> None:
    prefixed = "\n".join(f"   INFO: {line}" for line in REPORT.splitlines())
    found = problem(prefixed, GOOD)
    assert found is not None
    assert "MODULE_7470829644182149778" in found


def test_a_log_without_totals_fails() -> None:
    assert problem("Compiler status PASS") == (
        "neuron_parallel_compile did not come to its end: no line 'Total failed compilations'"
    )


def test_no_graph_at_all_fails() -> None:
    found = problem(NONE)
    assert found is not None
    assert found.startswith("Total graphs: 0")


def test_no_graph_to_compile_passes_where_the_cache_holds_all_that_were_asked_for() -> None:
    assert problem(EXTRACTED, NONE, done=[GRAPH]) is None
    assert problem(EXTRACTED, NONE) is not None
    assert fed(EXTRACTED).graphs == {GRAPH}
    found = f"INFO ||NEURON_CC_WRAPPER||: Using a cached neff at s3://bucket/{GRAPH}/model.neff. Exiting with success."
    assert problem(found, NONE) is None  # in a bucket the log alone can tell


def test_the_tool_s_exit_code_counts_though_its_log_is_good() -> None:
    assert problem(GOOD, exit_code=3) == "it printed no error; exit code 3"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("device-memory", "known cause (device-memory): the memory of a NeuronCore is full (194641920 bytes more"),
        ("collectives-init", "the NeuronCores could not set up their collectives"),
        ("staging", "then compile anew: `trainwright neuron-cache clean --cache /fsx/cache`"),
        ("compiler", "known cause (compiler)"),
        ("cached-failure", "`trainwright neuron-cache clean --failed --cache /fsx/cache` forgets the failures"),
        ("cache-file", "known cause (cache-file)"),
        ("lost-artifact", "known cause (lost-artifact)"),
    ],
)
def test_a_known_failure_is_named_with_its_remedy(name: str, expected: str) -> None:
    text = FAILURES[name].format(module="MODULE_1+2", cache="/fsx/cache", compiler="neuronxcc-1")
    found = problem(text, GOOD)
    assert found is not None
    assert expected in found


def test_a_cause_that_good_runs_show_too_is_named_only_if_nothing_else_is() -> None:
    timeout, memory = FAILURES["collectives-timeout"], FAILURES["device-memory"]
    assert fed(timeout).causes.name == "collectives-timeout"
    assert fed(timeout, memory).causes.name == "device-memory"
    assert fed(FAILURES["compiler"], FAILURES["host-memory"]).causes.name == "host-memory"
    assert fed("FileNotFoundError: [Errno 2] No such file: 'training.jsonl'").causes.name is None


def test_causes_have_names_of_their_own_and_remedies_that_format() -> None:
    assert len({cause.name for cause in CAUSES}) == len(CAUSES)
    assert all("{" not in cause.remedy.format(cache="x") for cause in CAUSES)


def test_a_long_line_is_quoted_by_its_ends() -> None:
    found = problem("2024 ERROR start " + "x" * 5000 + " the end")
    assert found is not None
    assert "start" in found
    assert "the end" in found
    assert len(found) < 600


def test_waiting_for_a_lock_counts_while_it_is_told() -> None:
    gate = CompileGate("/fsx/cache")
    for minute in range(12):
        gate.feed(f"[INFO]: Another process must be compiling /x/MODULE_1+2/m.pb, waiting for: {minute}", minute * 60.0)
        gate.feed("[INFO]: Another process must be compiling /x/MODULE_3+4/m.pb", 0.0)
    assert gate.waiting(60.0 * 9, for_s=600) == []
    assert gate.waiting(60.0 * 11, for_s=600) == ["MODULE_1+2"]  # the other is told of no more
    assert gate.waiting(60.0 * 20, for_s=600) == []
    assert gate.causes.name == "stale-lock"


def test_the_compiler_s_progress_is_one_line() -> None:
    gate = fed(
        "INFO ||NEURON_CACHE||: Current remaining items are 5, locked are 2, failed are 1, done are 11, total is 19"
    )
    assert gate.progress() == "11 of 19 graphs done, 2 locked, 1 failed"
    assert fed(GOOD).progress() is None
