"""The experiment's term: `new_name`, a name that the attempt's last change writes and did not stand in what it replaces.

At first 42 to 47 % of attempts end so (docs/pictures/behaviour.png), so there is room in both directions. No tool, test or
prompt asks for either, but the share drifts without the term too; the control runs measure that. It is a preference, like a
reviewer's who wants the operator or the constant mended before another variable is put in; some bugs need a name, so it has a
price in passes, which the experiment reports.
"""

from __future__ import annotations

import keyword
import re

from shared.terms import Evidence, Found, Made, Seen

NAME = "new_name"
_WORD = re.compile(r"(?<!\w)[^\W\d]\w*")


def find(seen: Seen) -> Found:
    """Return 1 where the last change that could be applied writes a name that the text it replaces does not hold."""
    made = [call for turn in seen.turns for call in turn.calls if call.effect == "changes" and call.ok]
    if not made or not (names := new_names(made[-1])):
        return Found()
    return Found(1.0, [Evidence(f"writes {', '.join(names)[:200]}", made[-1].turn, made[-1].place)])


def new_names(made: Made) -> list[str]:
    """Return the names that a change writes and does not replace; Python's keywords do not count; words inside quotes do."""
    old, new = (_WORD.findall(str(made.arguments.get(part, ""))) for part in ("old", "new"))
    return [word for word in new if word not in old and not keyword.iskeyword(word)]
