# SPDX-License-Identifier: Apache-2.0
"""The subcommands, one module each.

``add_arguments(parser)`` says what a subcommand takes; ``run(args)`` does it and returns the exit code.
"""
