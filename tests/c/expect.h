/*
 * expect.h - the few lines that a C test needs: EXPECT counts a failure and says where, finish() reports.
 */
#ifndef EXPECT_H
#define EXPECT_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int failures;
static long long checks;

#define EXPECT(condition, ...)                                                                               \
    do {                                                                                                     \
        ++checks;                                                                                            \
        if (!(condition) && ++failures <= 20) {                                                              \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition);                                           \
            printf(__VA_ARGS__);                                                                             \
            printf("\n");                                                                                    \
        }                                                                                                    \
    } while (0)

static int finish(const char* name) {
    printf("%-16s %lld checks, %d failures\n", name, checks, failures);
    return failures != 0;
}

#endif
