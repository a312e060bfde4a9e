# SPDX-License-Identifier: Apache-2.0
"""The path of a spike: the ranks' part and the driver's, and the event that is gathered, completed and written."""
