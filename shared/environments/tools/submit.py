"""`submit`: ends the attempt with the work as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.contracts.messages import StopReason
from shared.environments import Result, ToolSpec
from shared.environments.tools import Toolbox, ToolError, parameters


class Tool:
    spec = ToolSpec("submit", "Submit your work. Ends the task.", parameters({}), "ends")

    async def run(self, box: Toolbox, arguments: Mapping[str, Any]) -> Result:
        if box.unsubmittable is not None and (why := await box.unsubmittable()):
            raise ToolError(why)
        return Result(text="submitted", ends=StopReason.submitted)
