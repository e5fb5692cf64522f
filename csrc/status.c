/*
 * status.c - the text of the last error, one per thread; and the selection count.
 */
#include "check.h"
#include "selection.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512];

const char* dion3_last_error(void) { return last_error; }

dion3_status d3_fail(dion3_status status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

int64_t dion3_selection_count(double fraction, int64_t n) { return d3_selection_count(fraction, n); }
