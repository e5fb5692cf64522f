/*
 * table.cuh - one launch for any number of items: the item table as a kernel parameter.
 *
 * A kernel takes `const __grid_constant__ d3_table<Entry>`: up to 32764 bytes of parameters (CUDA 12.1,
 * compute capability 7.0), so no copy to the device and nothing to free. Every entry owns a range of
 * consecutive blocks; first[] holds where each range begins. A block finds its entry by a look-up of
 * the entries around its bucket of blocks and a binary search between the two, usually of length 0 or 1,
 * all in the constant cache.
 *
 * Items of one call that need different kernels (dtypes, axis) go to one launch per kernel; a call with more
 * items than a table holds makes more launches.
 */
#ifndef DION3_TABLE_CUH
#define DION3_TABLE_CUH

#include "cuda_check.cuh"

#define D3_PARAMETER_BYTES 32764
#define D3_BUCKETS 128
#define D3_MAX_BLOCKS 0x7fffffffull

template <typename Entry>
struct d3_table {
    static constexpr int CAPACITY =
        (D3_PARAMETER_BYTES - 16 - 2 * (D3_BUCKETS + 4)) / (int)(sizeof(Entry) + sizeof(uint32_t));
    Entry entries[CAPACITY];
    uint32_t first[CAPACITY];          /* the first block of each entry */
    uint16_t entry_at[D3_BUCKETS + 1]; /* the entry of the first block of each bucket */
    uint16_t shift;                    /* a bucket is 2^shift blocks */
};

/* The entry that owns a block. */
template <typename Entry>
__device__ __forceinline__ uint32_t d3_find(const d3_table<Entry>& table, uint32_t block) {
    const uint32_t bucket = block >> table.shift;
    uint32_t low = table.entry_at[bucket], high = table.entry_at[bucket + 1];
    while (low < high) {
        const uint32_t middle = (low + high + 1) >> 1;
        if (table.first[middle] <= block) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/* Which kernel an item needs and how many blocks. 0 blocks: nothing to do. D3_TOO_LARGE: more than a grid. */
struct d3_work {
    int kernel;
    uint64_t blocks;
};

#define D3_TOO_LARGE (~0ull)

static inline dion3_status d3_check_workspace(const char* operation, const void* workspace,
                                              size_t workspace_bytes, size_t needed) {
    D3_REQUIRE(workspace_bytes >= needed,
               "%s: workspace_bytes=%zu must be at least %zu (ask %s_workspace_size)", operation,
               workspace_bytes, needed, operation);
    D3_REQUIRE(needed == 0 || (workspace && (uintptr_t)workspace % 16 == 0),
               "%s: workspace=%p must not be NULL and must be aligned to 16 bytes", operation, workspace);
    return DION3_OK;
}

template <typename Entry>
static dion3_status d3_launch_table(d3_table<Entry>* table, uint32_t count, uint32_t blocks,
                                    const void* kernel, int threads, dion3_stream stream) {
    static_assert(sizeof(d3_table<Entry>) <= D3_PARAMETER_BYTES, "a table must fit into the parameters");
    static_assert(d3_table<Entry>::CAPACITY < 65536, "entry_at holds 16-bit entry numbers");
    void* arguments[] = {table};
    uint32_t shift = 0, entry = 0;
    if (count == 0) return DION3_OK;
    while ((blocks - 1) >> shift >= D3_BUCKETS) ++shift;
    table->shift = (uint16_t)shift;
    for (uint32_t bucket = 0; bucket <= D3_BUCKETS; ++bucket) {
        const uint64_t block = (uint64_t)bucket << shift;
        while (entry + 1 < count && table->first[entry + 1] <= block) ++entry;
        table->entry_at[bucket] = (uint16_t)entry;
    }
    D3_CUDA(cudaLaunchKernel(kernel, dim3(blocks), dim3((unsigned)threads), arguments, 0, stream));
    D3_LAUNCHED();
    return DION3_OK;
}

/* Runs all items: prepare turns a source item into an entry and says which of the kernels takes it and in
 * how many blocks; *workspace points at what is left of the workspace and is moved on by what the item
 * needs. It is called several times per item and must answer alike. */
template <typename Source, typename Entry>
static dion3_status d3_launch(const char* operation, const Source* sources, int64_t count,
                              d3_work (*prepare)(const Source*, Entry*, char**), const void* const* kernels,
                              int threads, void* workspace, dion3_stream stream) {
    d3_table<Entry> table;
    Entry entry;
    uint64_t present = 0;
    char* left = (char*)workspace;
    for (int64_t i = 0; i < count; ++i) {
        const d3_work work = prepare(&sources[i], &entry, &left);
        if (work.blocks == 0) continue;
        if (work.blocks > D3_MAX_BLOCKS) {
            return d3_fail(DION3_ERR_UNSUPPORTED,
                           "%s: item %lld: rows and cols must be below 2^31 and the batch must fit into a "
                           "grid of 2^31 - 1 blocks on CUDA",
                           operation, (long long)i);
        }
        present |= 1ull << work.kernel;
    }
    for (int kernel = 0; present >> kernel; ++kernel) {
        uint32_t used = 0;
        uint64_t blocks = 0;
        if (!(present >> kernel & 1)) continue;
        left = (char*)workspace;
        for (int64_t i = 0; i < count; ++i) {
            const d3_work work = prepare(&sources[i], &entry, &left);
            if (work.blocks == 0 || work.kernel != kernel) continue;
            if (used == (uint32_t)d3_table<Entry>::CAPACITY || blocks + work.blocks > D3_MAX_BLOCKS) {
                D3_TRY(d3_launch_table(&table, used, (uint32_t)blocks, kernels[kernel], threads, stream));
                used = 0;
                blocks = 0;
            }
            table.entries[used] = entry;
            table.first[used] = (uint32_t)blocks;
            ++used;
            blocks += work.blocks;
        }
        D3_TRY(d3_launch_table(&table, used, (uint32_t)blocks, kernels[kernel], threads, stream));
    }
    return DION3_OK;
}

#endif
