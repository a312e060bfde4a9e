# SPDX-License-Identifier: Apache-2.0
"""Ways of running an actor that verl 0.7 does not have."""
