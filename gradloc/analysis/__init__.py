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
"""Where the gradient comes from: task, entropy and KL gradients over buckets of prompts by reward variance.

Now and then, before an actor update and without taking a step, the whole batch's gradient is split twice: by term of
the loss and by how much the rewards of a prompt's rollouts differ; or, if asked, by the probability of the tokens.
``reporter`` is the trainer's side and ``rows`` the workers'; ``actor`` names what they ask of the trainer's actor.
"""
