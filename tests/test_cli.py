"""The command line as a whole: options may stand anywhere among a command's words."""

import json
import subprocess
import sys

import pytest

from trainwright.cli import main

SITE = ("site.vertex.project=my-project", "site.vertex.bucket=my-bucket", "~local")


@pytest.mark.parametrize("place", range(4))
def test_options_may_stand_anywhere_among_words(place: int, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["cloud", "setup", *SITE[:place], "--json", *SITE[place:]])
    assert not ended.value.code
    (repository,) = [
        step["make"] for step in json.loads(capfd.readouterr().out)["steps"] if step["name"] == "repository for images"
    ]
    assert "--project=my-project" in repository


@pytest.mark.parametrize("words", [("cloud", "setup", *SITE, "--jsom"), ("rules", "--json", "more")])
def test_what_no_command_knows_is_refused(words: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"unrecognized arguments: {words[-1]}" in capfd.readouterr().err


def test_a_reader_that_has_seen_enough_of_a_list_gets_no_traceback() -> None:
    program = [sys.executable, "-c", "from trainwright.cli import main; main(['rules'])"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as rules:
        assert rules.stdout is not None
        assert rules.stderr is not None
        rules.stdout.close()  # as `| head` does
        assert rules.stderr.read() == ""
    assert rules.returncode == 0
