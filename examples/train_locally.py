"""Train a tiny policy on this machine: local AgentCore Runtime, agent processes, rollout gateway, GRPO."""

import asyncio
import os
from pathlib import Path
from statistics import fmean

from agentcore_rl_toolkit import RolloutClient, run_rollouts
from agentcore_rl_toolkit.local import LocalAgentCore
from agentcore_rl_toolkit.local.grpo import group_advantages
from agentcore_rl_toolkit.local.math_tasks import math_tasks
from agentcore_rl_toolkit.local.policy import FOLDER, TinyPolicy
from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer, RolloutGateway, ThreadedGatewayServer

STEPS, TASKS, SAMPLES = 8, 6, 6


async def train(client, server, policy):
    for step in range(STEPS):
        stream = run_rollouts(client, server, math_tasks(step, TASKS), samples=SAMPLES, max_concurrent=12, seed=step)
        rollouts = [rollout async for rollout in stream]
        rewards = [rollout.reward for rollout in rollouts if not rollout.failed]
        errors = [rollout.error for rollout in rollouts if rollout.failed]
        print(f"{step + 1}: mean reward {fmean(rewards or [float('nan')]):.2f}, {len(errors)} failed", *errors[:1])
        rows, advantages = [], []  # a group: the samples of one payload
        for index in range(TASKS):
            group = [rollout for rollout in rollouts if rollout.payload_index == index]
            for rollout, advantage in zip(group, group_advantages([r.reward for r in group]), strict=True):
                rows += rollout.records
                advantages += [advantage or 0.0] * len(rollout.records)
        policy.update(rows, advantages, learning_rate=1.0)


policy = TinyPolicy()
gateway = RolloutGateway(backend=policy, renderer=HfTemplateRenderer(FOLDER))
local = LocalAgentCore("python rl_app.py", cwd=Path(__file__).parent / "local_math_agent")
with local, ThreadedGatewayServer(gateway) as server:
    os.environ.update(local.environment())
    with RolloutClient(local.agent_runtime_arn, local.bucket, exp_id="try", model_id="tiny", tps_limit=None) as client:
        asyncio.run(train(client, server, policy))
