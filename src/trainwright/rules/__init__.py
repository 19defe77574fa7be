"""The table of rules that a run must meet before anything is paid for."""

from trainwright.rules import general, nemo, nxdt, vertex
from trainwright.rules.case import Case, Facts, Rule, Severity, is_below, leaves

__all__ = ["RULES", "Case", "Facts", "Rule", "Severity", "is_below", "leaves"]

RULES: tuple[Rule, ...] = (*general.RULES, *nemo.RULES, *nxdt.RULES, *vertex.RULES)
