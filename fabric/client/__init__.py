"""The client SDK: `Client` for asyncio, `BlockingClient` for everybody else, `ask_status` for operators.

    async with Client("tcp://127.0.0.1:5555") as client:
        result = await client.infer("resnet50", {"input": image}, budget_ms=25)
        print(result.outputs["top_k"], result.ledger)

A request ends in exactly one way: its outputs, or one typed error of `fabric.errors`. The frontend answers within
the budget; should it not, the client's own timer does (`DeadlineExceeded`). Should the frontend be gone, another one
answers, if the client was given several; else `PeerLost` says so.
"""

from fabric.client.blocking import BlockingClient
from fabric.client.client import Client, InferResult, RunResult
from fabric.client.client_options import ClientOptions
from fabric.client.request_checks import Inputs
from fabric.operator_questions import ask_status

__all__ = ["BlockingClient", "Client", "ClientOptions", "InferResult", "Inputs", "RunResult", "ask_status"]
