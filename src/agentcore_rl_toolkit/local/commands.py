"""InvokeAgentRuntimeCommand: a shell command beside the agent, its output as it comes."""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
from collections.abc import AsyncGenerator
from typing import Any

from .processes import Process, read_pipe
from .sessions import Session

# An event may not exceed 64 KB, and JSON may write a byte as six characters.
_CHUNK = 10_000
# Once the command has ended, a pipe that is silent for this long is held open by a background child of it.
_DRAIN_SECONDS = 0.2

_Event = dict[str, Any]


async def run(session: Session, command: str, timeout: float) -> AsyncGenerator[_Event, None]:
    """Run ``command`` in a fresh bash, in the session's directory and environment.

    Yields ``contentStart``, ``contentDelta`` (stdout or stderr), ``contentStop`` (exitCode, status). Closing
    the generator kills the command. A command that a signal ended has exit code 128 + signal, as in a shell;
    one that ran into ``timeout`` (seconds) has -1.
    """
    queue: asyncio.Queue[_Event] = asyncio.Queue(maxsize=16)
    (out, out_write), (err, err_write) = os.pipe(), os.pipe()
    with open(out_write, "wb"), open(err_write, "wb"):  # noqa: ASYNC230 - only to close our copies
        process = await session.agent.supervisor.start(
            ["bash", "-c", command],
            session=session.tag,
            main=False,
            cwd=session.work,
            env=session.env,
            stdout=out_write,
            stderr=err_write,
        )
    pumps = [
        asyncio.create_task(_pump("stdout", await read_pipe(out), process, queue)),
        asyncio.create_task(_pump("stderr", await read_pipe(err), process, queue)),
    ]
    last = asyncio.create_task(_finish(process, pumps, timeout, queue))
    try:
        yield {"contentStart": {}}
        while True:
            event = await queue.get()
            yield event
            if "contentStop" in event:
                return
    finally:
        if not process.exited.done():
            process.signal(signal.SIGKILL)
        for task in (*pumps, last):
            task.cancel()
        await asyncio.gather(*pumps, last, return_exceptions=True)


async def _pump(name: str, reader: asyncio.StreamReader, process: Process, queue: asyncio.Queue[_Event]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may lie across two chunks
    while True:
        read = asyncio.ensure_future(reader.read(_CHUNK))
        first: list[asyncio.Future[Any]] = [read, process.exited]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not read.done():
                await asyncio.wait({read}, timeout=_DRAIN_SECONDS)
            data = read.result() if read.done() else b""
        finally:
            read.cancel()
        if text := decoder.decode(data, final=not data):
            await queue.put({"contentDelta": {name: text}})
        if not data:
            return


async def _finish(
    process: Process, pumps: list[asyncio.Task[None]], timeout: float, queue: asyncio.Queue[_Event]
) -> None:
    await asyncio.wait({process.exited}, timeout=timeout)
    status = "COMPLETED"
    if not process.exited.done():
        status = "TIMED_OUT"
        process.signal(signal.SIGKILL)
    code = await process.exited
    await asyncio.gather(*pumps)
    code = -1 if status == "TIMED_OUT" else 128 - code if code < 0 else code
    await queue.put({"contentStop": {"exitCode": code, "status": status}})
