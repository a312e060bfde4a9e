# SPDX-License-Identifier: Apache-2.0
"""What verl 0.9 has beside verl 0.7's ways of running an actor."""
