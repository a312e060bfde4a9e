# SPDX-License-Identifier: Apache-2.0
"""The way of a spike: the rank's side and the driver's, what is gathered of it, completed and written."""
