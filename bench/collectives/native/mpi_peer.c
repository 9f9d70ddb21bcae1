// One rank of an MPI peer: mpi_peer SOCKET. What Open MPI does is set by mpirun's options.
//
// bf16 and fp16, which MPI does not know, are uint16 with an operation of ours, vectorised by the compiler.
// Between orders every rank blocks in read(), outside of MPI, which would poll.
#include <mpi.h>

#include "orders.h"

static int rank, ranks;
static char *data, *own_block, *sum_block;
static size_t data_bytes, block_bytes;
static MPI_Datatype type;
static MPI_Op op, add_bf16_op, add_fp16_op;
static int count, last_loops = 1;

static void add_bf16(void *in, void *inout, int *length, MPI_Datatype *unused) {
  const uint16_t *restrict a = in;
  uint16_t *restrict b = inout;
  (void)unused;
  for (int i = 0; i < *length; ++i) {  // finite values only: a NaN could become infinity here
    const union { uint32_t bits; float value; } x = {.bits = (uint32_t)a[i] << 16}, y = {.bits = (uint32_t)b[i] << 16};
    const union { float value; uint32_t bits; } sum = {.value = x.value + y.value};
    b[i] = (uint16_t)((sum.bits + 0x7fff + (sum.bits >> 16 & 1)) >> 16);
  }
}

static void add_fp16(void *in, void *inout, int *length, MPI_Datatype *unused) {
  const _Float16 *restrict a = in;
  _Float16 *restrict b = inout;
  (void)unused;
  for (int i = 0; i < *length; ++i) b[i] = (_Float16)((float)a[i] + (float)b[i]);
}

static void prepare(const char *dtype, size_t bytes) {
  free(data);
  free(own_block);
  free(sum_block);
  data = own_block = sum_block = NULL;
  data_bytes = bytes;
  if (bytes > 0) {
    block_bytes = BLOCK * type_bytes(dtype);
    data = big_buffer(bytes);
    own_block = make_block(rank, dtype);
    sum_block = make_block(-ranks, dtype);
    count = (int)(bytes / type_bytes(dtype));
    type = strcmp(dtype, "fp32") == 0 ? MPI_FLOAT : MPI_UINT16_T;
    op = strcmp(dtype, "fp32") == 0 ? MPI_SUM : strcmp(dtype, "bf16") == 0 ? add_bf16_op : add_fp16_op;
    fill_with(data, bytes, own_block, block_bytes);
  }
  ANSWER("{}");
}

static void measure(int loops) {
  last_loops = loops;
  double *each = malloc((size_t)loops * sizeof *each);
  fill_with(data, data_bytes, own_block, block_bytes);
  MPI_Barrier(MPI_COMM_WORLD);
  const double begun = now_s();
  double before = begun;
  for (int i = 0; i < loops; ++i) {
    MPI_Allreduce(MPI_IN_PLACE, data, count, type, op, MPI_COMM_WORLD);
    const double after = now_s();
    each[i] = after - before;
    before = after;
  }
  answer_times(before - begun, each, loops);
  free(each);
}

static void check(void) {
  if (last_loops > 1) {  // many in a row do not end in a sum that is known
    fill_with(data, data_bytes, own_block, block_bytes);
    MPI_Allreduce(MPI_IN_PLACE, data, count, type, op, MPI_COMM_WORLD);
  }
  ANSWER("{\"right\": %s}", filled_with(data, data_bytes, sum_block, block_bytes) ? "true" : "false");
}

static void wait_for_late_rank(double late_s) {
  MPI_Barrier(MPI_COMM_WORLD);
  const double cpu = cpu_s(), begun = now_s();
  if (rank == 0) usleep((useconds_t)(late_s * 1e6));
  MPI_Allreduce(MPI_IN_PLACE, data, count, type, op, MPI_COMM_WORLD);
  ANSWER("{\"cpu_s\": %.6f, \"seconds\": %.6f}", cpu_s() - cpu, now_s() - begun);
}

int main(int argc, char **argv) {
  char line[MAX_LINE], *words[MAX_WORDS];
  if (argc != 2) return 2;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  MPI_Op_create(add_bf16, 1, &add_bf16_op);
  MPI_Op_create(add_fp16, 1, &add_fp16_op);
  orders_open(argv[1], rank, "");
  while (orders_next(line, words) > 0) {
    if (strcmp(words[0], "prepare") == 0) prepare(words[1], (size_t)strtoull(words[2], NULL, 10));
    if (strcmp(words[0], "time") == 0) measure(atoi(words[2]));
    if (strcmp(words[0], "check") == 0) check();
    if (strcmp(words[0], "wait") == 0) wait_for_late_rank(atof(words[2]));
  }
  MPI_Finalize();
  return 0;
}
