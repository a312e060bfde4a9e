# SPDX-License-Identifier: Apache-2.0
.PHONY: demo test test-slow test-browser check

demo:          ## a gradient spike in a real verl run on this machine's CPU, traced to its token
	./run_experiment.sh demo

test:          ## lint and the default tests; makes its own environment under .gradloc/
	scripts/test.sh

test-slow:     ## what takes longer than the default suite may
	.gradloc/venv/bin/python -m pytest -m slow

test-browser:  ## opens the report in headless Chromium (apt-get install chromium chromium-driver)
	.gradloc/venv/bin/python -m pytest -m browser

check:         ## the patch is what gradloc/ and verl_overrides/ say
	bash make_patch.sh --check
