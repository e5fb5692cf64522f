/*
 * check.h - how a C function refuses its arguments, on both devices alike.
 *
 * D3_REQUIRE(condition, "m=%lld must be a multiple of 8", (long long)m) stores the text for
 * dion3_last_error() and returns DION3_ERR_INVALID from the enclosing function. The d3_check_* functions
 * hold every rule about item tables that does not depend on the device; a _cpu or _cuda function calls
 * its own before it touches anything.
 */
#ifndef DION3_CHECK_H
#define DION3_CHECK_H

#include "dion3.h"

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define D3_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define D3_PRINTF(text, first)
#endif

/* Stores the text and returns the status. */
dion3_status d3_fail(dion3_status status, const char* format, ...) D3_PRINTF(2, 3);

#define D3_REQUIRE(condition, ...)                                                                           \
    do {                                                                                                     \
        if (!(condition)) return d3_fail(DION3_ERR_INVALID, __VA_ARGS__);                                    \
    } while (0)

/* Passes a status on. */
#define D3_TRY(call)                                                                                         \
    do {                                                                                                     \
        const dion3_status status_ = (call);                                                                 \
        if (status_ != DION3_OK) return status_;                                                             \
    } while (0)

dion3_status d3_check_momentum(const dion3_momentum_item* items, int64_t count);
dion3_status d3_check_select(const dion3_select_item* items, int64_t count);
dion3_status d3_check_gather(const dion3_gather_item* items, int64_t count);
dion3_status d3_check_neuron(const dion3_neuron_item* items, int64_t count);
dion3_status d3_check_update(const dion3_update_item* items, int64_t count);
dion3_status d3_check_adamw(const dion3_adamw_item* items, int64_t count);

/* One tensor of `batch` matrices of rows x cols: a dtype we know, strides >= 0, data not NULL unless it is
 * empty, aligned to its element. `written`: no two elements may share an address by a stride of 0. */
dion3_status d3_check_tensor(const char* operation, int64_t item, const char* name,
                             const dion3_tensor* tensor, int64_t batch, int64_t rows, int64_t cols,
                             int written);

#ifdef __cplusplus
}
#endif

#endif
