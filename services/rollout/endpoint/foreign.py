"""One attempt of an agent that is not ours: from the key that it is given to the reason for which the attempt is over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from services.rollout.agent import Model
from services.rollout.endpoint.recording import Recording
from services.rollout.endpoint.server import Endpoint
from services.rollout.recorder import Recorder
from shared.contracts.messages import Effort, StopReason
from shared.contracts.run import Sampling
from shared.environments import Driven, InfrastructureError, Way, Workspace
from shared.renderers import Renderer
from shared.renderers.chat import Chat


@dataclass(slots=True)
class ForeignAgent:
    """Stands where services.rollout.agent.Agent stands for agents of ours."""

    endpoint: Endpoint
    workspace: Driven
    recording: Recording
    deadline: bool = False  # set before the task is cancelled: submit the work as it is
    _made: tuple[int, Recorder] = field(default_factory=lambda: (0, Recorder()))

    @classmethod
    def of(
        cls, endpoint: Endpoint, renderer: Renderer, model: Model, workspace: Workspace, sampling: Sampling, run: str
    ) -> ForeignAgent:
        """Raises InfrastructureError where the checkpoint's format holds no conversations."""
        assert isinstance(workspace, Driven)
        if not isinstance(renderer, Chat):
            raise InfrastructureError(
                f"format {renderer.name}: holds no conversations; allowed for agents of others: a chat format"
            )
        recording = Recording(renderer, model, workspace.limits, sampling.temperature, run=run)
        return cls(endpoint, workspace, recording)

    @property
    def effort(self) -> Effort:
        return self.recording.effort

    @property
    def recorder(self) -> Recorder:
        nodes = len(self.recording.tree.nodes)
        if self._made[0] != nodes:
            self._made = nodes, self.recording.tree.recorder()
        return self._made[1]

    async def run(self) -> StopReason:
        """Return why the attempt ended. Raises InfrastructureError, and CancelledError unless `deadline` was set before."""
        try:
            with self.endpoint.attempt(self.recording) as key:
                async with self.endpoint.door(self.recording) as connect:
                    return await self._race(Way(key, connect))
        except asyncio.CancelledError:
            if not self.deadline:
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]  # a coroutine always runs in a task
            return StopReason.deadline
        finally:
            self.recording.end(StopReason.deadline)
            self.workspace.notes.update(self.recording.notes)

    async def _race(self, way: Way) -> StopReason:
        """Wait for the agent to leave, for a limit of the attempt, or for its time to be over."""
        recording = self.recording
        driving = asyncio.ensure_future(self.workspace.drive(way))
        over = asyncio.ensure_future(recording.over.wait())
        try:
            seconds = self.workspace.limits.seconds or None
            await asyncio.wait({driving, over}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if recording.failed is not None:
                raise recording.failed
            if driving.done():
                driving.result()
                return recording.ended or StopReason.submitted
            return recording.ended or StopReason.deadline
        finally:
            recording.end(StopReason.deadline)
            over.cancel()
            driving.cancel()
            await asyncio.wait({driving})
            if not driving.cancelled() and isinstance(error := driving.exception(), InfrastructureError):
                recording.failed = recording.failed or error
