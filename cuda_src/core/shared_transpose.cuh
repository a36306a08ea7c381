// shared_transpose.cuh: a matrix in shared memory, filled along its rows and emptied along its columns.
//   SharedTranspose::fill    vectors of FILL bytes of a row, copied past the registers where they can be
//   SharedTranspose::empty   vectors of STORE bytes of a column, transposed by ldmatrix where elements allow
// Bits are moved, never computed with. See cuda_src/README.md for the pictures.
#pragma once

#include "core/tensor_core.cuh"

// Where an element comes from, or that it is zero.
template <typename T>
struct Source {
    const T* address;
    bool inside;
};

// Nothing to do at a step. A lambda without a body would be a host function to NVRTC 13.0 and older.
struct Nothing {
    template <class... Arguments>
    DEVICE void operator()(const Arguments&...) const {}
};

template <typename T, int ROWS, int COLUMNS, int FILL, int STORE, int THREADS>
struct SharedTranspose {
    // 16 bytes of a row lie in one place. A square of PLACE x PLACE elements is a cell.
    static constexpr int PLACE = 16 / sizeof(T), PLACES = ceil_div(COLUMNS, PLACE);
    // Rows that are read together, PLACE or PLACE / 4 of them apart, lie in different banks.
    static constexpr int PITCH = sizeof(T) == 2 ? PLACES | 1 : PLACES, PAD = sizeof(T) == 2 ? 2 : 1;
    static constexpr int BYTES = 16 * (ROWS * PITCH + ceil_div(ROWS, PLACE) * PAD);

    // Index of the row's place.
    DEVICE static int place(int row, int place) { return row * PITCH + row / PLACE * PAD + place; }
    DEVICE static int element(int row, int column) {
        return place(row, column / PLACE) * PLACE + column % PLACE;
    }

    // ------------------------------------------------------------------------ fill

    static constexpr int FILL_RUN = FILL / sizeof(T), FILL_VECTORS = ceil_div(COLUMNS, FILL_RUN);
    static constexpr int FILLS = ceil_div(ROWS * FILL_VECTORS, THREADS);
    static_assert(FILL >= sizeof(T), "vectors of whole elements");

    // The thread's part of the matrix. source(row, column) is where a vector of the row comes from.
    // Follow it by copy_async_commit.
    template <class From>
    DEVICE static void fill(T* matrix, From source) {
        const int thread = recomputed(threadIdx.x);
        if constexpr (FILL >= 4) {
#pragma unroll(FILLS <= 16 ? FILLS : 8)
            for (int step = 0; step < FILLS; ++step) {
                const int index = step * THREADS + thread, row = index / FILL_VECTORS;
                const int column = (index - row * FILL_VECTORS) * FILL_RUN;
                if (index >= ROWS * FILL_VECTORS) break;
                const Source<T> from = source(row, column);
                copy_async<FILL>(matrix + element(row, column), from.address, from.inside);
            }
        } else {  // through registers, several at once
            static_assert(FILL == sizeof(T), "narrow vectors are elements");
            constexpr int BATCH = 8;
            for (int first = 0; first < FILLS; first += BATCH) {
                T value[BATCH];
#pragma unroll
                for (int b = 0; b < BATCH; ++b) {
                    const int index = (first + b) * THREADS + thread, row = index / COLUMNS;
                    if (index >= ROWS * COLUMNS) break;
                    const Source<T> from = source(row, index - row * COLUMNS);
                    value[b] = from.inside ? *from.address : zero<T>();
                }
#pragma unroll
                for (int b = 0; b < BATCH; ++b) {
                    const int index = (first + b) * THREADS + thread, row = index / COLUMNS;
                    if (index >= ROWS * COLUMNS) break;
                    matrix[element(row, index - row * COLUMNS)] = value[b];
                }
            }
        }
    }

    // ------------------------------------------------------------------------ empty

    // Single elements go down the columns, a thread each. Else a warp takes a strip of
    // CELLS = LINES * SPLIT cells, LINES below each other and SPLIT side by side. A lane gets a column
    // of its cell: PLACE elements, in VECTORS vectors of RUN. Vector k of line l is number
    // k * LINES + l of the strip, so that lanes with neighbouring lines hold neighbouring vectors.
    using V = typename Bytes<STORE>::type;
    static constexpr bool SINGLE = STORE == sizeof(T);
    static constexpr int RUN = STORE / sizeof(T), VECTORS = SINGLE ? 1 : PLACE / RUN;
    static constexpr int CELLS = 32 / PLACE, SPLIT = ROWS * CELLS <= 32 ? CELLS : ROWS * 4 <= 32 && CELLS >= 4 ? 4 : ROWS * 2 <= 32 && CELLS >= 2 ? 2 : 1;
    static constexpr int LINES = CELLS / SPLIT, STRIP_ROWS = LINES * PLACE;
    static constexpr int DOWN = ceil_div(ROWS, STRIP_ROWS), STRIPS = DOWN * ceil_div(PLACES, SPLIT);
    static constexpr int STEPS = SINGLE ? ceil_div(ROWS * COLUMNS, THREADS) : ceil_div(STRIPS, THREADS / 32);
    static constexpr int BATCH = SINGLE ? 8 : 4, HELD = BATCH * VECTORS;
    static_assert(RUN * sizeof(T) == STORE && THREADS % 32 == 0, "whole elements, whole warps");

    // Calls before(slot, row, column) for each vector of a batch of at most HELD, then
    // body(slot, row, column, vector), until the thread has seen its part of the matrix. The vector
    // is rows row .. row + RUN - 1 of the column.
    template <class Before, class Body>
    DEVICE static void empty(const T* matrix, Before before, Body body) {
        const int thread = recomputed(threadIdx.x);
        for (int first = 0; first < STEPS; first += BATCH) {
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
                visit(first + b, thread, [&](int k, int row, int column) { before(b * VECTORS + k, row, column); });
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                V vector[VECTORS];
                take(vector, matrix, first + b, thread);
                visit(first + b, thread, [&](int k, int row, int column) {
                    body(b * VECTORS + k, row, column, vector[k]);
                });
            }
        }
    }

  private:
    // A lane's cell within the strip, and its column within the cell.
    DEVICE static int cell_of(int lane) { return sizeof(T) == 4 ? lane / 4 : lane % CELLS; }
    DEVICE static int column_of(int lane) { return sizeof(T) == 4 ? lane % 4 : lane / CELLS; }
    // Row within the strip of element x of a column of the cell.
    DEVICE static int row_of(int x, int cell) { return (x / RUN * LINES + cell % LINES) * RUN + x % RUN; }

    template <class Body>
    DEVICE static void visit(int step, int thread, Body body) {
        if constexpr (SINGLE) {
            const int index = step * THREADS + thread, column = index / ROWS;
            if (index < ROWS * COLUMNS) body(0, index - column * ROWS, column);
        } else {
            const int strip = step * (THREADS / 32) + thread / 32, across = strip / DOWN;
            const int lane = thread % 32, cell = cell_of(lane);
            const int row = (strip - across * DOWN) * STRIP_ROWS + cell % LINES * RUN;
            const int column = (across * SPLIT + cell / LINES) * PLACE + column_of(lane);
            if (strip >= STRIPS || column >= COLUMNS) return;
#pragma unroll
            for (int k = 0; k < VECTORS; ++k)
                if (row + k * (LINES * RUN) < ROWS) body(k, row + k * (LINES * RUN), column);
        }
    }

    // The vectors that visit names.
    DEVICE static void take(V (&vector)[VECTORS], const T* matrix, int step, int thread) {
        if constexpr (SINGLE) {
            const int index = step * THREADS + thread, column = index / ROWS;
            if (index < ROWS * COLUMNS)
                vector[0] = *reinterpret_cast<const V*>(matrix + element(index - column * ROWS, column));
        } else {
            const int strip = step * (THREADS / 32) + thread / 32, across = strip / DOWN;
            if (strip >= STRIPS) return;
            const int row0 = (strip - across * DOWN) * STRIP_ROWS, place0 = across * SPLIT, lane = thread % 32;
            // Past the last row and place any other will do.
            const auto of = [&](int x, int cell) {
                return matrix + PLACE * place(min(row0 + row_of(x, cell), ROWS - 1),
                                              min(place0 + cell / LINES, PLACES - 1));
            };
            union {
                u32 word[4];
                T element[PLACE];
                V vector[VECTORS];
            } column;
            if constexpr (sizeof(T) == 2)
                ldmatrix_x4_trans(column.word, of(lane / 8 * 2 + lane % 2, lane % 8 / 2));
            else if constexpr (sizeof(T) == 4)
                ldmatrix_x4(column.word, of(lane / 8, lane % 8));
            else {
#pragma unroll
                for (int x = 0; x < PLACE; ++x) column.element[x] = of(x, cell_of(lane))[column_of(lane)];
            }
#pragma unroll
            for (int k = 0; k < VECTORS; ++k) vector[k] = column.vector[k];
        }
    }
};
