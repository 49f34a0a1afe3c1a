struct Range { int64_t first, end; };

static inline Range cut(int64_t size, bool is_cut, int64_t p, int64_t chunks) {
  return is_cut ? Range{size * p / chunks, size * (p + 1) / chunks} : Range{0, size};
}

template <class P> static inline P* start(int64_t address) { return reinterpret_cast<P*>(address); }

template <class T> static inline T rounded(T x) { return T(float(bfloat16(float(x)))); }

static inline uint32_t as_index(int64_t i) { return uint32_t(i); }

template <class P> static inline void clear(P* partial, int64_t t, int64_t numel) {
  std::memset(partial + t * numel, 0, numel * sizeof(P));
}

static inline double with(double sum, double x) { return sum + x; }
static inline uint32_t with(uint32_t largest, uint32_t x) { return maximum_(largest, x); }

// Returns the end of the group of N elements that has element i, at most last.
template <int64_t N> static inline int64_t end_of(int64_t i, int64_t last) {
  const int64_t next = (i / N + 1) * N;
  return next < last ? next : last;
}

template <class P, class T> static void add(const P* partial, T* to, int64_t t, int64_t copies, int64_t numel) {
  for (int64_t i = 0; i < numel; i++) {
    P sum = 0;
    for (int64_t q = 0; q < copies; q++) sum = with(sum, partial[(t * copies + q) * numel + i]);
    to[t * numel + i] = T(sum);
  }
}

// The work on a tensor t: loop for each of its chunks p, begin before the first one and end after the last one.
template <class Begin, class Loop, class End> struct Phase {
  int64_t chunks;
  Begin begin;
  Loop loop;
  End end;
  void alone(int64_t t) const {
    begin(t);
    for (int64_t p = 0; p < chunks; p++) loop(t, p);
    end(t);
  }
  template <class Is> void together(int64_t count, const Is& is_there) const {
#pragma omp for
    for (int64_t t = 0; t < count; t++)
      if (is_there(t)) begin(t);
#pragma omp for schedule(dynamic, 1)
    for (int64_t w = 0; w < count * chunks; w++)
      if (is_there(w / chunks)) loop(w / chunks, w % chunks);
#pragma omp for
    for (int64_t t = 0; t < count; t++)
      if (is_there(t)) end(t);
  }
};

template <class Begin, class Loop, class End> static Phase<Begin, Loop, End> phase(int64_t n, Begin b, Loop l, End e) {
  return {n, b, l, e};
}

template <class Is, class... Phases>
static void run(bool alone, int64_t count, int64_t threads, const Is& is_there, const Phases&... phases) {
  if (alone) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < count; t++)
      if (is_there(t)) (phases.alone(t), ...);
  } else {
#pragma omp parallel num_threads(threads) if (threads > 1)
    (phases.together(count, is_there), ...);
  }
}
