# SPDX-License-Identifier: Apache-2.0
"""In torchaudio's place: LLaMA-Factory imports it for models of sound, and its wheels need another build of torch."""
