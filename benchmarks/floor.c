/* The floor: Algorithm 1 for perceptrons D-H-C on one core, as fast as a compiler makes it.

   Inputs lie as [feature][row], so that the loops over the rows of a minibatch become vector instructions; where the
   hidden units fill vectors of their own, the two large products run over these instead. Rows are shuffled already and
   repeated behind the end, so that a minibatch is a window that needs no copy. A model is one array: W1[D][H], b1[H],
   W2[H][C], b2[C]; so are the three moments of Adam with amsgrad. Sizes come with -DD= -DH= -DC= and -DB=, the rows of
   a minibatch. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define W 16 /* floats in a vector */
#define TILE 4
#elif defined(__AVX__)
#define W 8
#define TILE 2
#else
#define W 4
#define TILE 2
#endif
#define ROWS ((B + W - 1) / W * W) /* those from B on count for nothing */
#define SIZE (D * H + H + H * C + C)
#define WIDE (H % W == 0) /* hidden units fill vectors */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));

static float hidden[H][ROWS], out[C][ROWS], back[H][ROWS], flipped[ROWS][H], grad[SIZE];

/* to[m][n] = start[m] + the sum over k of a[k * ak + m * am] * b[k][n], for M rows of N vectors that fit registers */
INLINE void tile(int M, int N, int K, const float *start, const float *a, int ak, int am, const float *b, int bk,
                 float *to, int width) {
    vec sum[4][TILE];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sum[m][n] = (vec){} + (start ? start[m] : 0);
    for (int k = 0; k < K; k++)
        for (int n = 0; n < N; n++) {
            vec v = *(const vec *)(b + k * bk + n * W);
            for (int m = 0; m < M; m++) sum[m][n] += a[k * ak + m * am] * v;
        }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) *(vec *)(to + m * width + n * W) = sum[m][n];
}

INLINE void strip(int M, int N, int K, const float *start, const float *a, int ak, int am, const float *b, int bk,
                  float *to, int width) {
    int n = 0;
    for (; n + TILE <= N; n += TILE) tile(M, TILE, K, start, a, ak, am, b + n * W, bk, to + n * W, width);
    if (N % TILE) tile(M, N % TILE, K, start, a, ak, am, b + n * W, bk, to + n * W, width);
}

INLINE void product(int M, int N, int K, const float *start, const float *a, int ak, int am, const float *b, int bk,
                    float *to, int width) {
    int m = 0;
    for (; m + 4 <= M; m += 4)
        strip(4, N, K, start ? start + m : 0, a + m * am, ak, am, b, bk, to + m * width, width);
    if (M % 4) strip(M % 4, N, K, start ? start + m : 0, a + m * am, ak, am, b, bk, to + m * width, width);
}

INLINE float dot(const float *a, const float *b) {
    float sum = 0;
    for (int r = 0; r < ROWS; r++) sum += a[r] * b[r];
    return sum;
}

INLINE float total(const float *a) {
    float sum = 0;
    for (int r = 0; r < ROWS; r++) sum += a[r];
    return sum;
}

/* The gradient of the mean cross-entropy over B rows: x[i * stride + row], the same as by_row[row][feature]. */
static void gradient(const float *model, const float *x, int stride, const float *by_row, const int32_t *y) {
    const float *W1 = model, *b1 = W1 + D * H, *W2 = b1 + H, *b2 = W2 + H * C;
    float *gW1 = grad, *gb1 = gW1 + D * H, *gW2 = gb1 + H, *gb2 = gW2 + H * C, top[ROWS], sum[ROWS];
    if (WIDE) {
        product(B, H / W, D, 0, by_row, 1, D, W1, H, flipped[0], H);
        for (int j = 0; j < H; j++)
            for (int r = 0; r < ROWS; r++) hidden[j][r] = flipped[r][j] + b1[j];
    } else {
        product(H, ROWS / W, D, b1, W1, H, 1, x, stride, hidden[0], ROWS);
    }
    for (int j = 0; j < H; j++)
        for (int r = 0; r < ROWS; r++) hidden[j][r] = hidden[j][r] > 0 ? hidden[j][r] : 0;
    product(C, ROWS / W, H, b2, W2, C, 1, hidden[0], ROWS, out[0], ROWS);
    for (int r = 0; r < ROWS; r++) top[r] = out[0][r], sum[r] = 0;
    for (int c = 1; c < C; c++)
        for (int r = 0; r < ROWS; r++) top[r] = out[c][r] > top[r] ? out[c][r] : top[r];
    for (int c = 0; c < C; c++)
        for (int r = 0; r < ROWS; r++) sum[r] += out[c][r] = expf(out[c][r] - top[r]);
    for (int r = 0; r < ROWS; r++) sum[r] = r < B ? 1 / (B * sum[r]) : 0;
    for (int c = 0; c < C; c++)
        for (int r = 0; r < ROWS; r++) out[c][r] = out[c][r] * sum[r] - (y[r] == c && r < B ? 1.0f / B : 0);
    product(H, ROWS / W, C, 0, W2, 1, C, out[0], ROWS, back[0], ROWS);
    for (int j = 0; j < H; j++)
        for (int r = 0; r < ROWS; r++) back[j][r] = hidden[j][r] > 0 ? back[j][r] : 0;
    for (int c = 0; c < C; c++) {
        for (int j = 0; j < H; j++) gW2[j * C + c] = dot(hidden[j], out[c]);
        gb2[c] = total(out[c]);
    }
    for (int j = 0; j < H; j++) gb1[j] = total(back[j]);
    if (WIDE) {
        for (int j = 0; j < H; j++)
            for (int r = 0; r < B; r++) flipped[r][j] = back[j][r];
        product(D, H / W, B, 0, by_row, D, 1, flipped[0], H, gW1, H);
    } else {
        for (int i = 0; i < D; i++)
            for (int j = 0; j < H; j++) gW1[i * H + j] = dot(x + i * stride, back[j]);
    }
}

static void update(float *restrict model, float *restrict moments, int taken, float lr, float decay) {
    float *restrict mean = moments, *restrict square = mean + SIZE, *restrict largest = square + SIZE;
    float rate = lr / (1 - powf(0.9f, taken)), root = 1 / sqrtf(1 - powf(0.999f, taken));
    for (int i = 0; i < SIZE; i++) {
        float g = grad[i] + decay * model[i];
        mean[i] = 0.9f * mean[i] + 0.1f * g;
        square[i] = 0.999f * square[i] + 0.001f * g * g;
        largest[i] = largest[i] > square[i] ? largest[i] : square[i];
        model[i] -= rate * mean[i] / (sqrtf(largest[i]) * root + 1e-8f);
    }
}

/* `rounds` rounds of `steps` local steps of every client, each followed by the average, which lands in `model`.
   Clients have n rows each: x[client][feature][n + ROWS], by_row[client][n + ROWS][feature], y[client][n + ROWS];
   moments[client][3][SIZE]; `taken` steps are behind them. */
void train(int clients, int rounds, int steps, int n, const float *x, const float *by_row, const int32_t *y,
           float *model, float *moments, int taken, float lr, float decay) {
    static float own[SIZE], sum[SIZE];
    uint32_t random = 2463534242u;
    int stride = n + ROWS;
    for (int round = 0; round < rounds; round++, taken += steps) {
        memset(sum, 0, sizeof sum);
        for (int c = 0; c < clients; c++) {
            memcpy(own, model, sizeof own);
            for (int s = 0; s < steps; s++) {
                random ^= random << 13, random ^= random >> 17, random ^= random << 5;
                long first = random % n, begin = (long)c * stride + first;
                gradient(own, x + (long)c * D * stride + first, stride, by_row + begin * D, y + begin);
                update(own, moments + (long)c * 3 * SIZE, taken + s + 1, lr, decay);
            }
            for (int i = 0; i < SIZE; i++) sum[i] += own[i];
        }
        for (int i = 0; i < SIZE; i++) model[i] = sum[i] / clients;
    }
}

int padding(void) { return ROWS; }
