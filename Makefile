PY ?= python3

include csrc/build.mk
