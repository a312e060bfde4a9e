# SPDX-License-Identifier: Apache-2.0
"""Under which names things travel from the trainer to the actor, with verl's own."""

POLICY_KEY = "gradloc"
"""Meta info of a batch: the update's :class:`~.loop.messages.Policy`."""
ROW_KEY = "gradloc_row"
"""int (R,) in a batch: each row's number in the driver's batch."""
SEQUENCE_KEY = "sequence_id"
"""str (R,) among a batch's labels: ``<uid>:<rollout index>``."""
VERSIONS_KEY = "versions"
"""(R,): the steps whose weights sampled a row's first token and its last, or None."""
