"""The mistakes of users: printed without a traceback, with what is wrong, the key to change and what would be right.

Exit codes of the command line: 0 done, 1 a run failed, 2 input, 3 refused by preflight, 75 preempted (start again).
"""

from collections.abc import Sequence

EXIT_FAILED = 1
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130  # as a shell names Ctrl-C


class UserError(Exception):
    """Input that cannot work. The message names the values, the key to change and what would be right."""

    exit_code = 2


class RefusedError(UserError):
    """Preflight found errors; nothing was submitted."""

    exit_code = 3


class RunFailedError(UserError):
    """Runs that started and did not succeed."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    @classmethod
    def raise_for(cls, results: Sequence[object]) -> None:
        """Raise what sums up the failures among the results of several runs; return where there is none.

        The exit code is 75 only if being preempted is all that happened.
        """
        failures = [result for result in results if isinstance(result, cls)]
        if len(results) == 1 and failures:
            raise failures[0]
        if failures:
            is_preempted = all(failure.exit_code == EXIT_PREEMPTED for failure in failures)
            raise cls(
                f"{len(failures)} of {len(results)} runs did not succeed; see the table",
                EXIT_PREEMPTED if is_preempted else EXIT_FAILED,
            )
