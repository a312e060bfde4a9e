# SPDX-License-Identifier: Apache-2.0
"""A collection of gradient spikes with known causes, and every tool's answer to each."""
