# SPDX-License-Identifier: Apache-2.0
"""verl's Megatron engine: dense models over tensor, pipeline and data parallel ranks; imports megatron."""
