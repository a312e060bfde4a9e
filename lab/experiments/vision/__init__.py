# SPDX-License-Identifier: Apache-2.0
"""The demo with images in its prompts."""
