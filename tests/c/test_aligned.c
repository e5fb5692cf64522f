/*
 * test_aligned.c - the rule by which kernels choose 16-byte accesses, against every address they would use.
 */
#include "cuda/aligned.h"
#include "expect.h"

/* The definition, row by row. */
static int rows_aligned(uintptr_t data, int64_t bytes, const int64_t* sizes, const int64_t* strides) {
    for (int64_t b = 0; b < sizes[0]; ++b) {
        for (int64_t i = 0; i < sizes[1]; ++i) {
            if ((data + (uintptr_t)((b * strides[0] + i * strides[1]) * bytes)) % 16 != 0) return 0;
        }
    }
    return sizes[2] == 1 || strides[2] == 1;
}

/* Every combination of sizes, strides, element sizes and first addresses. */
static void test_all(void) {
    static const int64_t few[3] = {1, 2, 3}, steps[9] = {0, 1, 2, 3, 4, 7, 8, 12, 16};
    int accepted = 0;
    for (int v = 0; v < 3 * 3 * 3 * 9 * 9 * 3 * 2 * 4; ++v) {
        int rest = v;
        int64_t sizes[3], strides[3];
        for (int d = 0; d < 3; ++d, rest /= 3) sizes[d] = few[rest % 3];
        for (int d = 0; d < 2; ++d, rest /= 9) strides[d] = steps[rest % 9];
        strides[2] = rest % 3;
        rest /= 3;
        const int64_t bytes = rest % 2 ? 2 : 4;
        static const uintptr_t offsets[4] = {0, 2, 8, 16};
        const uintptr_t data = 4096 + offsets[rest / 2];
        const int expected = rows_aligned(data, bytes, sizes, strides);
        const int got = d3_rows_aligned((void*)data, bytes, sizes[0], strides[0], sizes[1], strides[1],
                                        sizes[2], strides[2]);
        EXPECT(got == expected, "sizes %d %d %d strides %d %d %d of %d bytes at %d: %d", (int)sizes[0],
               (int)sizes[1], (int)sizes[2], (int)strides[0], (int)strides[1], (int)strides[2], (int)bytes,
               (int)data, got);
        accepted += got;
    }
    EXPECT(accepted > 1000, "%d accepted", accepted);
}

int main(void) {
    test_all();
    return finish("aligned");
}
