# Copyright 2025 Individual Contributor: the GradLoc for verl authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Stabilizers: what an update does against a gradient spike, each by itself and off by default.

``ratio_clip`` weighs tokens and sequences that drifted from the policy that wrote them, ``layer_clip`` bounds each
layer's gradient by its own history, ``skip_step`` takes no step that is far off the last ones: plain arithmetic, all
three. ``stabilizer`` is what verl's actor calls.
"""

__all__ = ["STABILIZER_KEY"]

STABILIZER_KEY = "gradloc_stabilizer"
"""Under this key the statistics travel: to the actor in meta_info, back among the first rank's metrics."""
