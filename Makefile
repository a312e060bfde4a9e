# SPDX-License-Identifier: Apache-2.0
.PHONY: demo quick test lint docs dist test-slow test-browser test-verl09 test-trl test-trainers test-megatron test-newest mutants figures check

demo:          ## a gradient spike in a real verl run on this machine's CPU, traced to its token
	./run_experiment.sh demo

quick:         ## the quick ones of the tests that need neither verl nor Ray: a minute
	scripts/test.sh quick

test:          ## lint and all default tests; makes its own environment under .gradloc/
	scripts/test.sh

lint:          ## ruff, format, shellcheck, types, and that patches/ is what its sources say
	scripts/test.sh lint

docs:          ## the site of docs/, strictly; makes an environment of its own under .gradloc/
	scripts/docs.sh

dist:          ## a wheel and an sdist in dist/, built without a network; the wheel is tried
	scripts/dist.sh

test-slow:     ## the others: more layouts and arms, benchmarks, real runs; hours
	scripts/test.sh slow

test-browser:  ## opens the report in headless Chromium (apt-get install chromium chromium-driver)
	scripts/test.sh browser

test-verl09:   ## what runs on verl 0.9; makes another environment under .gradloc/
	scripts/test.sh verl09

test-trl:      ## what runs on TRL; makes another environment under .gradloc/
	scripts/test.sh trl

test-trainers: ## other trainers by their own commands, each in an environment of its own under .gradloc/
	scripts/test.sh trainers

test-megatron: ## a loop of Megatron's own on the newest megatron-core; in the environment of test-verl09
	scripts/test.sh megatron

test-newest:   ## the tests of any loop on the newest torch, transformers and accelerate
	scripts/test.sh newest

mutants:       ## which changes of the code would the tests not notice; an hour on two cores, a run that was stopped goes on
	scripts/test.sh mutants

figures:       ## measures anew what docs/benchmarks.md states of one process: an hour on two cores
	for name in trigger "unrepeatable --seeds 2" driver ranks; do \
		.gradloc/venv/bin/python -m lab.benchmarks.$$name && \
		cp runs/benchmarks/$${name%% *}/*.json lab/benchmarks/results/ || exit 1; \
	done

check:         ## patches/ is what its sources say
	bash make_patch.sh --check
