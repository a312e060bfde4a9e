# SPDX-License-Identifier: Apache-2.0
"""The demo with pictures in its prompts."""
