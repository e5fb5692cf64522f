# How the C library is made: build/libdion3.a from the C files and, where nvcc is, the CUDA files.
# Nothing here needs torch or a GPU. Included by the Makefile; `make -f csrc/build.mk lib` works too.
#
#   DION3_BUILD         auto (CUDA when nvcc is found), cpu, cuda (fails without nvcc)
#   DION3_CUDA_ARCHS    architectures of the generic kernels, e.g. "80 90"; files named *_sm90*.cu are
#                       for sm_90a only
#   CC, NVCC            the compilers
PY ?= python3
BUILD_DIR ?= build
DION3_BUILD ?= auto
DION3_CUDA_ARCHS ?= 80 90 100 120
# What cuda-check compiles for, besides sm_90a.
CUDA_CHECK_ARCHS ?= 80 86 89 90 100 120
NVCC ?= $(or $(wildcard $(CUDA_HOME)/bin/nvcc),$(shell command -v nvcc 2>/dev/null))

LIB := $(BUILD_DIR)/libdion3.a
# Rounding is part of the contract: no contraction, no reordering. The two -fno- flags drop only errno and
# floating-point exception flags, without which loops over rounding do not vectorise.
OPENMP := $(shell echo 'int main(void) { return 0; }' | $(CC) -fopenmp -x c - -o /dev/null 2>/dev/null && echo -fopenmp)
C_FLAGS := -std=c11 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math -fPIC $(OPENMP) \
           -Wall -Wextra -Werror -pedantic
NVCC_FLAGS := -std=c++17 -O3 -lineinfo -Xcompiler -fPIC,-Wall,-Wextra,-Werror -Werror all-warnings

C_OBJECTS := $(patsubst csrc/%.c,$(BUILD_DIR)/obj/%.o,$(wildcard csrc/*.c csrc/cpu/*.c))
CU_SOURCES := $(wildcard csrc/cuda/*.cu)
CU_OBJECTS := $(patsubst csrc/%.cu,$(BUILD_DIR)/obj/%.cu.o,$(CU_SOURCES))

WITH_CUDA := $(if $(filter auto cuda,$(DION3_BUILD)),$(if $(NVCC),$(CU_OBJECTS)))
ifeq ($(DION3_BUILD),cuda)
ifeq ($(NVCC),)
$(error DION3_BUILD=cuda needs nvcc; set CUDA_HOME or NVCC, or use DION3_BUILD=cpu)
endif
endif
OBJECTS := $(C_OBJECTS) $(WITH_CUDA)

## Build

.PHONY: lib ext test-c cuda-check
lib: $(LIB) ## the C library build/libdion3.a, with the CUDA kernels where nvcc is found; needs no torch

ext: ## the Python extension dion3/_C, in place; rebuilds only what changed
	DION3_BUILD=$(DION3_BUILD) $(PY) setup.py -q build_ext --inplace

# A file that changes only when its text does: what is built depends on the flags and on the list of objects.
define remember
@mkdir -p $(dir $@)
@printf '%s\n' '$(1)' | cmp -s - $@ || printf '%s\n' '$(1)' > $@
endef

.PHONY: dion3-always
$(BUILD_DIR)/c-flags.txt: dion3-always
	$(call remember,$(CC) $(C_FLAGS))
$(BUILD_DIR)/cu-flags.txt: dion3-always
	$(call remember,$(NVCC) $(NVCC_FLAGS) $(DION3_CUDA_ARCHS))
$(BUILD_DIR)/objects.txt: dion3-always
	$(call remember,$(OBJECTS))

$(LIB): $(OBJECTS) $(BUILD_DIR)/objects.txt
	rm -f $@
	ar rcs $@ $(OBJECTS)

$(BUILD_DIR)/obj/%.o: csrc/%.c $(BUILD_DIR)/c-flags.txt
	@mkdir -p $(dir $@)
	$(CC) $(C_FLAGS) -MMD -MP -c $< -o $@

# The Hopper kernels live in registers: a spill, or a ptxas note that it dropped setmaxnreg or serialised
# wgmma (C75xx, C76xx), is an error.
$(BUILD_DIR)/obj/%.cu.o: csrc/%.cu $(BUILD_DIR)/cu-flags.txt
	@mkdir -p $(dir $@)
	@echo '$(NVCC) $<'
	@$(NVCC) $(NVCC_FLAGS) $(call gencode,$<) -MMD -MP -MF $(@:.o=.d) -c $< -o $@ > $@.log 2>&1 \
	    || { cat $@.log; rm -f $@; exit 1; }
	@! grep -E 'C7[56][0-9][0-9]|[^0-9][1-9][0-9]* bytes spill' $@.log || { rm -f $@; exit 1; }

gencode = $(if $(findstring _sm90,$(1)),-gencode arch=compute_90a$(,)code=sm_90a -Xptxas -v$(,)--warn-on-spills,$(generic_gencode))
# Two architectures of a file at a time: one file takes most of the compilation.
generic_gencode = --threads 2 $(foreach a,$(DION3_CUDA_ARCHS),-gencode arch=compute_$(a)$(,)code=sm_$(a)) \
    -gencode arch=compute_$(lowest_arch)$(,)code=compute_$(lowest_arch)
lowest_arch = $(firstword $(DION3_CUDA_ARCHS))
, := ,

# In a folder of its own, so that objects for other architectures are not made again.
cuda-check: $(if $(NVCC),,no-nvcc) ## compile all CUDA files for every architecture; a spill in a Hopper kernel is an error
	+$(MAKE) --no-print-directory -f csrc/build.mk cuda-objects BUILD_DIR=$(BUILD_DIR)/check \
	    DION3_CUDA_ARCHS="$(CUDA_CHECK_ARCHS)"

.PHONY: cuda-objects
cuda-objects: $(CU_OBJECTS)

.PHONY: no-nvcc
no-nvcc:
	@echo "nvcc was not found: set CUDA_HOME or NVCC" >&2; exit 1

# Plain C tests: each tests/c/test_*.c is a program, linked with the library and without torch. The headers
# must be C++ too.
C_TESTS := $(patsubst tests/c/%.c,$(BUILD_DIR)/tests/%,$(wildcard tests/c/test_*.c)) $(BUILD_DIR)/tests/headers
# With CUDA objects nvcc links, because it knows where its runtime library is.
LINK := $(if $(WITH_CUDA),$(NVCC) $(addprefix -Xcompiler ,$(OPENMP)),$(CC) $(OPENMP))

$(BUILD_DIR)/tests/%: tests/c/%.c $(LIB)
	@mkdir -p $(dir $@)
	$(CC) $(C_FLAGS) -O1 -Icsrc -MMD -MP -MT $@ -c $< -o $@.o
	$(LINK) $@.o $(LIB) -lm -o $@

$(BUILD_DIR)/tests/headers: tests/c/headers.cpp $(wildcard csrc/*.h)
	@mkdir -p $(dir $@)
	$(CXX) -std=c++17 -O1 -Wall -Wextra -Werror -pedantic -Icsrc $< -o $@

test-c: $(C_TESTS) ## the C tests: the library without torch
	@for test in $(C_TESTS); do $$test || exit 1; done

-include $(C_OBJECTS:.o=.d) $(CU_OBJECTS:.o=.d) $(C_TESTS:=.d)
