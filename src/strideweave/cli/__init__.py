"""The command line (extra ``strideweave[cli]``): one module a command, registered here."""

from __future__ import annotations

from strideweave.cli.benching import bench
from strideweave.cli.demonstrating import demo
from strideweave.cli.inspecting import inspect
from strideweave.cli.packing import pack
from strideweave.cli.program import Command, app, help_of
from strideweave.cli.tracing import trace
from strideweave.cli.verifying import verify

__all__ = ["app"]

for _command in (pack, inspect, verify, bench, demo, trace):
    app.command(cls=Command, help=help_of(_command))(_command)
