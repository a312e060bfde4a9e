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
"""GradLoc: which tokens made this gradient spike, why, and what the step would have been without them.

``verl_actor`` is the adapter to verl 0.7, ``verl_engine`` to verl 0.9; every other room knows no trainer.
"""

__version__ = "0.2.0"
"""The one place that names the version: the patch, the installed package and its commands read it here."""
