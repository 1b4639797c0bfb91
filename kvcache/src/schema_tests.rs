//! The tables of cache.md, recomputed from the schema.

use super::*;
use crate::geometry::WindowPage;

fn schema(geometry: V4Geometry, index_k: IndexKFormat) -> CacheSchema {
    CacheSchema::deepseek_v4(
        &geometry,
        &Formats {
            index_k,
            ..Formats::default()
        },
    )
    .unwrap()
}

fn flash(index_k: IndexKFormat) -> CacheSchema {
    schema(V4Geometry::flash(), index_k)
}

fn pro(index_k: IndexKFormat) -> CacheSchema {
    schema(V4Geometry::pro(), index_k)
}

#[test]
fn layer_counts_per_component() {
    let count = |schema: &CacheSchema, component: Component| {
        schema
            .rows()
            .iter()
            .filter(|row| row.component == component)
            .count()
    };
    let flash = flash(IndexKFormat::Fp8);
    let pro = pro(IndexKFormat::Fp8);
    for (component, flash_layers, pro_layers) in [
        (Component::SwaLatent, 43, 61),
        (Component::C4Latent, 21, 30),
        (Component::IndexK, 21, 30),
        (Component::C128Latent, 20, 31),
        (Component::C4State, 21, 30),
        (Component::IndexState, 21, 30),
        (Component::C128State, 20, 31),
        (Component::MtpLatent, 0, 0),
    ] {
        assert_eq!(count(&flash, component), flash_layers, "{component}");
        assert_eq!(count(&pro, component), pro_layers, "{component}");
    }
    let page_pools = |schema: &CacheSchema| {
        schema
            .rows()
            .iter()
            .filter(|row| row.space == Space::Page)
            .count()
    };
    assert_eq!((page_pools(&flash), page_pools(&pro)), (62, 91));
}

#[test]
fn page_bytes() {
    let page = |schema: CacheSchema| schema.slot_bytes(Space::Page);
    assert_eq!(page(flash(IndexKFormat::Fp8)), 998_208);
    assert_eq!(page(flash(IndexKFormat::Bf16)), 1_164_864);
    assert_eq!(page(pro(IndexKFormat::Fp8)), 1_430_208);
    assert_eq!(page(pro(IndexKFormat::Bf16)), 1_668_288);
    // 43 windows of 149,760, 21 rings of 65,536 and 21 of 16,384.
    assert_eq!(
        flash(IndexKFormat::Fp8).slot_bytes(Space::Window),
        8_160_000
    );
    assert_eq!(pro(IndexKFormat::Fp8).slot_bytes(Space::Window), 11_592_960);
    assert_eq!(flash(IndexKFormat::Fp8).slot_bytes(Space::Request), 122_880);
}

#[test]
fn strides() {
    let schema = flash(IndexKFormat::Fp8);
    let stride = |layer: u16, component| {
        let row = schema.row(LayerId(layer), component).unwrap();
        (
            row.used_bytes,
            row.stride_bytes,
            row.rows_per_page,
            row.entries_per_page,
        )
    };
    assert_eq!(stride(0, Component::SwaLatent), (37_376, 37_440, 64, 64));
    assert_eq!(stride(2, Component::C4Latent), (37_376, 37_440, 64, 64));
    assert_eq!(stride(2, Component::IndexK), (8_448, 8_448, 64, 64));
    assert_eq!(stride(3, Component::C128Latent), (1_168, 1_728, 2, 2));
    assert_eq!(stride(2, Component::C4State), (65_536, 65_536, 8, 256));
    assert_eq!(stride(2, Component::IndexState), (16_384, 16_384, 8, 256));
    assert_eq!(stride(3, Component::C128State), (6_144, 6_144, 1, u32::MAX));
    assert!(schema.row(LayerId(3), Component::IndexK).is_none());
    let formats = Formats {
        window_page: WindowPage::P256,
        ..Formats::default()
    };
    let wide = CacheSchema::deepseek_v4(&V4Geometry::flash(), &formats).unwrap();
    let row = wide.row(LayerId(0), Component::SwaLatent).unwrap();
    assert_eq!(
        (row.used_bytes, row.stride_bytes, row.pages_per_slot),
        (149_504, 149_760, 1)
    );
}

#[test]
fn row_counts_of_section_6_3() {
    let schema = flash(IndexKFormat::Fp8);
    let live = |component, layer: u16, n| {
        let row = schema.row(LayerId(layer), component).unwrap();
        let pages = schema.live_pages(row, n);
        let entries: u32 = pages
            .iter()
            .map(|page| page.entries.end - page.entries.start)
            .sum();
        let half = pages
            .iter()
            .flat_map(|page| page.entries.clone())
            .filter(|&entry| row.is_overlap_row(entry, n))
            .count() as u32;
        (entries, half)
    };
    // N, window, c4, c128, open c4, overlap, open c128, logical pages
    for (n, window, c4, c128, open_c4, overlap, open_c128, pages) in [
        (1, 1, 0, 0, 1, 0, 1, 1),
        (3, 3, 0, 0, 3, 0, 3, 1),
        (4, 4, 1, 0, 0, 4, 4, 1),
        (5, 5, 1, 0, 1, 4, 5, 1),
        (127, 127, 31, 0, 3, 4, 127, 1),
        (128, 128, 32, 1, 0, 4, 0, 1),
        (129, 128, 32, 1, 1, 4, 1, 1),
        (255, 128, 63, 1, 3, 4, 127, 1),
        (256, 128, 64, 2, 0, 4, 0, 1),
        (257, 128, 64, 2, 1, 4, 1, 2),
        (513, 128, 128, 4, 1, 4, 1, 3),
        (9_800, 128, 2_450, 76, 0, 4, 72, 39),
    ] {
        assert_eq!(
            live(Component::SwaLatent, 2, n),
            (window, 0),
            "window at {n}"
        );
        assert_eq!(live(Component::C4Latent, 2, n), (c4, 0), "c4 at {n}");
        assert_eq!(live(Component::IndexK, 2, n), (c4, 0), "index_k at {n}");
        assert_eq!(live(Component::C128Latent, 3, n), (c128, 0), "c128 at {n}");
        assert_eq!(
            live(Component::C4State, 2, n),
            (open_c4 + overlap, overlap),
            "c4 state {n}"
        );
        assert_eq!(
            live(Component::IndexState, 2, n),
            (open_c4 + overlap, overlap)
        );
        assert_eq!(
            live(Component::C128State, 3, n),
            (open_c128, 0),
            "c128 state at {n}"
        );
        assert_eq!(schema.slots_for(n).pages, pages, "pages at {n}");
    }
}

#[test]
fn totals_of_section_6_4() {
    let flash = flash(IndexKFormat::Fp8);
    let pro = pro(IndexKFormat::Fp8);
    for (n, flash_bytes, pro_bytes) in [
        (1, 363_032, 533_288),
        (127, 4_853_420, 6_916_592),
        (128, 4_137_248, 5_879_736),
        (129, 4_475_168, 6_377_400),
        (256, 4_630_080, 6_585_200),
        (2_048, 11_529_728, 16_461_696),
        (9_800, 41_493_176, 59_366_640),
        (1_048_576, 4_040_924_160, 5_784_335_360),
    ] {
        assert_eq!(flash.live_row_bytes(n), flash_bytes, "Flash at {n}");
        assert_eq!(pro.live_row_bytes(n), pro_bytes, "Pro at {n}");
    }
}

#[test]
fn window_pages_that_cross() {
    let schema = flash(IndexKFormat::Fp8);
    let row = schema.row(LayerId(0), Component::SwaLatent).unwrap();
    assert_eq!(schema.live_pages(row, 320).len(), 2);
    let pages = schema.live_pages(row, 321);
    assert_eq!(pages.len(), 3);
    assert_eq!(pages[0].entries, 193..256);
    assert_eq!(pages[0].page_ordinal, 3);
    assert_eq!(schema.window_ring_slots(), 2);
    assert_eq!(schema.slots_for(256).windows, 1);
    assert_eq!(schema.slots_for(257).windows, 2);
    assert_eq!(schema.slots_for(9_800).windows, 2);
}

#[test]
fn drafting_adds_one_row() {
    let geometry = V4Geometry {
        drafting: true,
        ..V4Geometry::flash()
    };
    let schema = schema(geometry, IndexKFormat::Bf16);
    assert_eq!(schema.layer_count(), 44);
    let row = schema.row(LayerId(43), Component::MtpLatent).unwrap();
    assert_eq!((row.stride_bytes, row.pages_per_slot), (37_440, 4));
    assert!(schema.live_pages(row, 1).is_empty());
    assert_eq!(row.live_entries(200, 128), 71..199);
}

#[test]
fn a_format_that_the_geometry_forbids_names_the_field() {
    let field = |geometry: V4Geometry, formats: Formats| match CacheSchema::deepseek_v4(
        &geometry, &formats,
    )
    .unwrap_err()
    .kind()
    {
        ErrorKind::FormatNotAllowed { field, .. } => field.clone(),
        other => panic!("{other:?}"),
    };
    let f32_formats = Formats {
        latent: LatentFormat::F32,
        index_k: IndexKFormat::F32,
        ..Formats::default()
    };
    let small = V4Geometry {
        head_dim: 32,
        rope_dim: 8,
        ..V4Geometry::flash()
    };
    assert_eq!(field(small.clone(), Formats::default()), "head_dim");
    let rope = V4Geometry {
        rope_dim: 32,
        ..V4Geometry::flash()
    };
    assert_eq!(field(rope, Formats::default()), "qk_rope_head_dim");
    let index = V4Geometry {
        index_head_dim: 64,
        ..V4Geometry::flash()
    };
    for index_k in [IndexKFormat::Fp8, IndexKFormat::Bf16] {
        let formats = Formats {
            index_k,
            ..f32_formats
        };
        assert_eq!(field(index.clone(), formats), "index_head_dim");
    }
    let small = V4Geometry {
        rope_dim: 8,
        index_head_dim: 16,
        ..small
    };
    let schema = CacheSchema::deepseek_v4(&small, &f32_formats).unwrap();
    let row = schema.row(LayerId(2), Component::C4State).unwrap();
    assert_eq!(row.row_bytes, 16 * 32);
    let bytes = |component| schema.row(LayerId(2), component).unwrap().row_bytes;
    assert_eq!(
        (bytes(Component::IndexK), bytes(Component::IndexState)),
        (64, 256)
    );
}

#[test]
fn an_impossible_geometry_names_the_field() {
    let field =
        |geometry: V4Geometry| match CacheSchema::deepseek_v4(&geometry, &Formats::default())
            .unwrap_err()
            .kind()
        {
            ErrorKind::ImpossibleGeometry { field, .. } => field.clone(),
            other => panic!("{other:?}"),
        };
    let flash = V4Geometry::flash;
    assert_eq!(
        field(V4Geometry {
            layer_ratios: vec![0, 2],
            ..flash()
        }),
        "compress_ratios[1]"
    );
    assert_eq!(
        field(V4Geometry {
            layer_ratios: vec![],
            ..flash()
        }),
        "num_hidden_layers"
    );
    assert_eq!(
        field(V4Geometry {
            head_dim: 0,
            ..flash()
        }),
        "head_dim"
    );
    assert_eq!(
        field(V4Geometry {
            rope_dim: 1_024,
            ..flash()
        }),
        "qk_rope_head_dim"
    );
    assert_eq!(
        field(V4Geometry {
            window_tokens: 0,
            ..flash()
        }),
        "sliding_window"
    );
}

#[test]
fn differences_name_the_telling_field() {
    let bf16 = flash(IndexKFormat::Bf16);
    let fp8 = flash(IndexKFormat::Fp8);
    let difference = bf16.first_difference(&fp8.fields()).unwrap();
    assert_eq!(difference.field, "index_k.encoding");
    assert_eq!(
        (difference.ours.as_str(), difference.theirs.as_str()),
        ("bf16", "fp8")
    );
    assert_ne!(bf16.fingerprint(), fp8.fingerprint());
    assert_eq!(bf16.first_difference(&bf16.fields()), None);

    let mut geometry = V4Geometry::flash();
    geometry.weights_digest[0] = 1;
    let other = schema(geometry, IndexKFormat::Bf16);
    let difference = bf16.first_difference(&other.fields()).unwrap();
    assert_eq!(difference.field, "model.weights_digest");

    let drafting = V4Geometry {
        drafting: true,
        ..V4Geometry::flash()
    };
    let drafting = schema(drafting, IndexKFormat::Bf16);
    let fields = bf16.fields();
    assert_eq!(drafting.first_difference(&fields).unwrap().theirs, "absent");
}

#[test]
fn format_ids() {
    let schema = flash(IndexKFormat::Bf16);
    let id = |layer, component| schema.format_id(schema.row(LayerId(layer), component).unwrap());
    assert_eq!(id(2, Component::SwaLatent), "swa_latent:v4:p64");
    assert_eq!(id(2, Component::C4Latent), "c4_latent:v4:p64");
    assert_eq!(id(3, Component::C128Latent), "c128_latent:v4:p2");
    assert_eq!(id(2, Component::IndexK), "index_k:bf16:p64:had1");
    assert_eq!(id(2, Component::C4State), "c4_state:f32ring8:raw");
    assert_eq!(id(3, Component::C128State), "c128_state:f32online:biased");
}
