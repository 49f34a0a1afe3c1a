// Looks at many tensors and their gradients in one call; addresses.py defines the constants and says what each function does.
// It reads torch's own objects, so it is compiled against the headers of the installed torch.
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

using Impl = c10::TensorImpl;

extern "C" {  // of Python, whose headers may be missing
char* PyList_GetItem(char* list, int64_t index);
void* PyInterpreterState_Get();
void* PyInterpreterState_ThreadHead(void* interpreter);
void* PyThreadState_Next(void* thread);
char* PyCapsule_New(void* pointer, const char* name, void (*destructor)(char*));
void* PyCapsule_GetPointer(char* capsule, const char* name);
void Py_IncRef(char* object);
extern char _Py_NoneStruct;
}

struct Form {  // a tensor as it was when the watch was made
  Impl* const* object;
  const void* address;
  const int64_t* extents;  // sizes, then strides
  int64_t dim;
  int64_t numel;
  int64_t span;  // elements from the first to behind the last
  int64_t bytes;  // the same in bytes
  c10::ScalarType dtype, grad_dtype;
};

struct Watch {
  std::vector<Form> forms;
  std::vector<int64_t> extents;
  std::vector<c10::Storage> kept_alive;  // the memory of gradients that a kernel may be reading while other code runs
  int64_t with_gradient;
  int64_t* gradients;
  char* present;
  const char* written;
  int64_t version;
};

static bool is_plain(const Impl& t) {
  constexpr c10::DispatchKeySet other{c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                      c10::DispatchKey::ZeroTensor, c10::DispatchKey::Python};
  return t.has_storage() && !t.key_set().has_any(other);
}

static bool lies_as(const Impl& t, const Form& form, c10::ScalarType dtype) {
  if (t.dim() != form.dim || t.dtype().toScalarType() != dtype) return false;
  const int64_t *sizes = t.sizes().data(), *strides = t.strides().data();
  bool equal = true;
  for (int64_t d = 0; d < form.dim; d++)
    equal &= sizes[d] == form.extents[d] & strides[d] == form.extents[form.dim + d];
  return equal;
}

static bool has_memory(const Impl& t, const Form& form) {  // a storage can be shorter than a tensor in it
  return !form.numel || (t.storage_offset() + form.span) * t.itemsize() <= t.unsafe_storage().nbytes();
}

static bool has_other_threads() {
  return PyThreadState_Next(PyInterpreterState_ThreadHead(PyInterpreterState_Get()));
}

static bool overlaps(const Impl& g, const Form& form) {  // a gradient in exactly its parameter's memory does no harm
  const auto *start = static_cast<const char*>(g.data()), *param = static_cast<const char*>(form.address);
  return start != param && start < param + form.bytes && param < start + form.span * g.itemsize();
}

static void prefetch(const std::vector<Form>& forms, int64_t i, int64_t end) {
  if (i + 16 < end) __builtin_prefetch(forms[i + 16].object);
  if (i + 8 < end) {
    const auto* t = reinterpret_cast<const char*>(*forms[i + 8].object);
    for (size_t line = 0; line < sizeof(Impl); line += 64) __builtin_prefetch(t + line);
  }
  if (i + 4 < end) __builtin_prefetch((**forms[i + 4].object).unsafe_storage().unsafeGetStorageImpl());
}

static Watch* in(char* capsule) { return static_cast<Watch*>(PyCapsule_GetPointer(capsule, nullptr)); }

static void destroy(char* capsule) { delete in(capsule); }

static char* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

extern "C" char* make_watch(int64_t count, Impl* const* const* tensors, int64_t with_gradient,
                            Impl* const* const* examples, int64_t* gradients, char* present) try {
  auto watch = std::make_unique<Watch>();
  size_t size = 0;
  for (int64_t i = 0; i < count; i++) size += 2 * (**tensors[i]).dim();
  watch->extents.reserve(size);
  for (int64_t i = 0; i < count; i++) {
    Impl& t = **tensors[i];
    if (!is_plain(t)) return none();
    const int64_t* extents = watch->extents.data() + watch->extents.size();
    for (const auto& part : {t.sizes(), t.strides()})
      watch->extents.insert(watch->extents.end(), part.begin(), part.end());
    const auto dtype = t.dtype().toScalarType();
    const auto grad_dtype = i < with_gradient ? (*examples[i])->dtype().toScalarType() : dtype;
    int64_t span = 1;
    for (int64_t d = 0; d < t.dim(); d++) span += (t.sizes()[d] - 1) * t.strides()[d];
    const int64_t bytes = t.numel() ? span * t.itemsize() : 0;
    watch->forms.push_back(
        {tensors[i], t.mutable_data(), extents, t.dim(), t.numel(), span, bytes, dtype, grad_dtype});
  }
  watch->with_gradient = with_gradient;
  watch->gradients = gradients;
  watch->present = present;
  watch->written = present;
  watch->version = 0;
  return PyCapsule_New(watch.release(), nullptr, destroy);
} catch (...) {
  return none();
}

// `offset` says how far into a tensor's Python object its pointer to torch's own object lies.
extern "C" int64_t look(char* capsule, char* grads, int64_t offset, int64_t first, int64_t end, int64_t keep_alive) {
  Watch* watch = in(capsule);
  const bool read_grad = grads == &_Py_NoneStruct;
  const auto& forms = watch->forms;
  if (keep_alive || has_other_threads()) watch->kept_alive.resize(watch->with_gradient);
  int64_t seen = 0;
  bool renewed = false;
  for (int64_t i = first; i < end; i++) try {
    prefetch(forms, i, end);
    const Form& form = forms[i];
    Impl& t = **form.object;
    if (!is_plain(t) || t.mutable_data() != form.address || !lies_as(t, form, form.dtype)) seen |= SEEN_MOVED;
    if (i >= watch->with_gradient) continue;
    const Impl* gradient = nullptr;
    if (read_grad) {
      if (t.grad().defined()) gradient = t.grad().unsafeGetTensorImpl();
    } else if (char* item = PyList_GetItem(grads, i); item != &_Py_NoneStruct) {
      gradient = *reinterpret_cast<Impl**>(item + offset);
    }
    int64_t found = 0;
    if (gradient) {
      const Impl& g = *gradient;
      if (is_plain(g) && g.device() == t.device() && lies_as(g, form, form.grad_dtype) && has_memory(g, form) &&
          !overlaps(g, form)) {
        found = form.numel ? reinterpret_cast<int64_t>(g.data()) : NO_ELEMENTS;
        if (!watch->kept_alive.empty()) watch->kept_alive[i] = g.storage();
      } else {
        seen |= SEEN_UNLIKE;
      }
    }
    watch->present[i] = gradient != nullptr;
    renewed |= found != watch->gradients[i];
    watch->gradients[i] = found;
  } catch (...) {
    seen |= SEEN_MOVED;
  }
  watch->version += renewed;
  return watch->version << FLAG_BITS | seen;
}

extern "C" void finish(char* capsule) {
  Watch* watch = in(capsule);
  for (int64_t i = 0; i < watch->with_gradient; i++) {
    Impl& t = **watch->forms[i].object;
    if (watch->written[i] && !t.is_inference()) t.bump_version();
  }
  watch->kept_alive.clear();
}

extern "C" void set_written(char* capsule, const char* written) { in(capsule)->written = written; }
